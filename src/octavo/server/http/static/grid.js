// The pool as a grid of physical blocks, drawn on a canvas: thousands of them, ten times per second.

// `blocks` is an array indexed by block id (0 is unused): {holders, cached, pinned} where holders is
// a list of {request, hue, sequence, index}. `onPoint(id)` is called with the block under the pointer
// or the keyboard cursor, or null.
// A grid with a `leader`, another grid, is at most as tall as that one, and its cells are no larger.
function makeGrid(canvas, onPoint, leader = null) {
  const MAX_HEIGHT = 440, MIN_HEIGHT = 160, MAX_CELL = 28, MIN_CELL = 4;
  const context = canvas.getContext("2d");
  const state = { numBlocks: 0, blocks: [], lit: null, cursor: 0, hasFocus: false };
  let columns = 1, cell = 10, colors = {}, scheduled = false;

  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    colors = {
      free: get("--free"), cached: get("--cached"), mark: get("--mark"), on: get("--on-block"),
      light: get("--light"), accent: get("--accent"), warm: get("--warm"),
    };
  }

  function layOut() {
    const width = canvas.parentElement.clientWidth;
    const most = leader ? Math.max(MIN_HEIGHT, leader.height()) : MAX_HEIGHT;
    for (cell = leader ? leader.cell() : MAX_CELL; cell > MIN_CELL; cell--) {
      columns = Math.max(1, Math.floor(width / cell));
      if (Math.ceil(state.numBlocks / columns) * cell <= most) break;
    }
    columns = Math.max(1, Math.floor(width / cell));
    const height = Math.max(cell, Math.ceil(state.numBlocks / columns) * cell);
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
  }

  function box(x, y, size) {
    context.beginPath();
    if (cell >= 9) context.roundRect(x, y, size, size, Math.min(4, size / 4));
    else context.rect(x, y, size, size);
  }

  function drawBlock(id) {
    const gap = cell >= 16 ? 3 : cell >= 8 ? 2 : 1;
    const x = ((id - 1) % columns) * cell;
    const y = Math.floor((id - 1) / columns) * cell;
    const block = state.blocks[id];
    const holders = block ? block.holders : [];
    const size = cell - gap;
    context.globalAlpha = state.lit && !state.lit.has(id) ? 0.22 : 1;
    context.fillStyle = holders.length
      ? `hsl(${holders[0].hue} 38% ${colors.light})`
      : block && block.pinned ? colors.accent : block && block.cached ? colors.cached : colors.free;
    box(x, y, size);
    context.fill();
    if (holders.length > 1) drawSharing(x, y, size, holders.length);
    if (block && block.pinned) {
      context.fillStyle = colors.warm;
      context.fillRect(x + size / 2 - size / 8, y + size / 2 - size / 8, size / 4, size / 4);
    }
    if (state.hasFocus && id === state.cursor) {
      context.globalAlpha = 1;
      context.strokeStyle = colors.mark;
      context.lineWidth = 2;
      context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    }
  }

  function drawSharing(x, y, size, count) {
    context.strokeStyle = colors.mark;
    context.lineWidth = cell >= 12 ? 2 : 1;
    const inset = context.lineWidth / 2;
    box(x + inset, y + inset, size - 2 * inset);
    context.stroke();
    if (cell >= 18) {
      context.fillStyle = colors.on;
      context.font = `600 ${Math.round(size * 0.5)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(count > 99 ? "…" : String(count), x + size / 2, y + size / 2 + 0.5);
    }
  }

  function draw() {
    scheduled = false;
    layOut();
    context.clearRect(0, 0, canvas.width, canvas.height);
    for (let id = 1; id <= state.numBlocks; id++) drawBlock(id);
    context.globalAlpha = 1;
  }

  function redraw() {
    if (!scheduled) requestAnimationFrame(draw);
    scheduled = true;
  }

  function point(id) {
    state.cursor = id || state.cursor;
    onPoint(id);
    redraw();
  }

  function blockAt(event) {
    const column = Math.floor(event.offsetX / cell);
    const id = Math.floor(event.offsetY / cell) * columns + column + 1;
    return column < columns && id >= 1 && id <= state.numBlocks ? id : null;
  }

  canvas.addEventListener("pointermove", (event) => onPoint(blockAt(event)));
  canvas.addEventListener("pointerdown", (event) => point(blockAt(event)));
  canvas.addEventListener("pointerleave", () => onPoint(null));
  canvas.addEventListener("focus", () => {
    state.hasFocus = canvas.matches(":focus-visible");
    if (state.hasFocus) point(state.cursor || 1);
  });
  canvas.addEventListener("blur", () => {
    state.hasFocus = false;
    point(null);
  });
  canvas.addEventListener("keydown", (event) => {
    const last = state.numBlocks;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -last, End: last };
    if (!(event.key in steps)) return;
    event.preventDefault();
    state.hasFocus = true;
    point(Math.min(last, Math.max(1, (state.cursor || 1) + steps[event.key])));
  });
  new ResizeObserver(redraw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColors();
    redraw();
  });
  readColors();
  return {
    cell: () => cell,
    height: () => canvas.clientHeight,
    update(numBlocks, blocks) {
      state.numBlocks = numBlocks;
      state.blocks = blocks;
      redraw();
    },
    // Highlights blocks, given as a Set of ids; null shows all blocks alike.
    light(ids) {
      state.lit = ids;
      redraw();
    },
  };
}
