// Small line charts of the last two minutes, drawn on canvases.

const CHART_SECONDS = 120;

// `series` is a list of {label, color} (the colour is a CSS variable); `format(value)` returns the text of a value.
function makeChart(canvas, series, format) {
  const context = canvas.getContext("2d");
  const HEIGHT = 110;
  let points = []; // [{t, values}]
  let scheduled = false;

  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // The next round number: 1, 2 or 5 times a power of ten.
  function ceiling(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value);
  }

  function draw() {
    scheduled = false;
    const width = canvas.parentElement.clientWidth;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(HEIGHT * scale);
      canvas.style.height = `${HEIGHT}px`;
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    const top = 16, bottom = HEIGHT - 4;
    const known = points.flatMap((point) => point.values).filter((value) => value !== null);
    const most = ceiling(Math.max(1e-9, ...known));
    context.strokeStyle = color("--line");
    context.lineWidth = 1;
    for (const level of [0, 0.5, 1]) {
      const y = Math.round(bottom - level * (bottom - top)) + 0.5;
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width, y);
      context.stroke();
    }
    context.fillStyle = color("--quiet");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "bottom";
    if (known.length) context.fillText(format(most), 0, top - 2);
    else context.fillText("no data yet", 0, bottom - 4);
    if (points.length === 0) return;
    const now = points[points.length - 1].t;
    // The first series is the main one, so it is drawn last, on top of the others.
    [...series].reverse().forEach((one) => {
      const number = series.indexOf(one);
      context.strokeStyle = color(one.color);
      context.lineWidth = 1.75;
      context.lineJoin = "round";
      context.beginPath();
      let penDown = false;
      for (const point of points) {
        const value = point.values[number];
        if (value === null) {
          penDown = false;
          continue;
        }
        const x = width - ((now - point.t) / CHART_SECONDS) * width;
        const y = bottom - (value / most) * (bottom - top);
        if (penDown) context.lineTo(x, y);
        else context.moveTo(x, y);
        penDown = true;
      }
      context.stroke();
    });
  }

  function redraw() {
    if (!scheduled) requestAnimationFrame(draw);
    scheduled = true;
  }

  new ResizeObserver(redraw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return {
    add(t, values) {
      points.push({ t, values });
      points = points.filter((point) => t - point.t <= CHART_SECONDS);
      const texts = series.map((one, i) => `${one.label} ${values[i] === null ? "none" : format(values[i])}`);
      canvas.setAttribute("aria-label", texts.join(", "));
      redraw();
    },
  };
}

// The quantile of a histogram, with linear interpolation inside a bucket; null if all counts are 0.
// `counts` has one entry more than `bounds`: the last one counts all values above the last bound.
function quantile(bounds, counts, fraction) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  let remaining = fraction * total;
  for (let i = 0; i < counts.length; i++) {
    if (remaining <= counts[i] && counts[i] > 0) {
      const low = i > 0 ? bounds[i - 1] : 0;
      const high = i < bounds.length ? bounds[i] : bounds[bounds.length - 1];
      return low + (high - low) * (remaining / counts[i]);
    }
    remaining -= counts[i];
  }
  return bounds[bounds.length - 1];
}
