// Draws the contents of the feed: the pool, the requests and their block tables, events and charts.

(() => {
  const { byId, make, setText } = session;
  const model = feed.model;
  const shown = { request: null, chosen: null }; // under the pointer; clicked
  let deviceBlocks = [], swapBlocks = [];

  // ------------------------------------------------------------------ the pool

  function describe(id, blocks, tier) {
    const block = blocks[id];
    if (!block) return "";
    if (block.holders.length === 0) {
      if (block.pinned) return `Block ${id}: held by the pinned prefix ${block.pinned}`;
      return `Block ${id}: free${block.cached ? ", but still cached" : ""}`;
    }
    const byRequest = new Map();
    for (const holder of block.holders) {
      byRequest.set(holder.request, [...(byRequest.get(holder.request) || []), holder]);
    }
    const who = [...byRequest].map(([request, all]) => {
      const numbers = all.map((holder) => holder.sequence).sort((a, b) => a - b);
      return `${request} (sequence ${numbers.join(", ")}; logical block ${all[0].index})`;
    });
    const count = block.holders.length;
    const sharing = count > 1 ? `shared by ${count}` : "held by one";
    const pin = block.pinned ? `; pinned as ${block.pinned}` : "";
    return `Block ${id}${tier === "swap" ? " of the swap tier" : ""}: ${sharing}: ${who.join("; ")}${pin}`;
  }

  function pointAt(id, blocks, tier) {
    if (id === null) {
      shown.request = shown.chosen;
      return light();
    }
    setText(byId("told"), describe(id, blocks, tier));
    const holder = blocks[id] && blocks[id].holders[0];
    shown.request = holder ? holder.request : shown.chosen;
    light();
  }

  const device = makeGrid(byId("pool"), (id) => pointAt(id, deviceBlocks, "device"));
  const swap = makeGrid(byId("swap"), (id) => pointAt(id, swapBlocks, "swap"), device);

  function heldBy(request, tier) {
    const own = request.sequences.filter((sequence) => sequence.tier === tier);
    return new Set(own.flatMap((sequence) => sequence.tables.flat()).filter((id) => id > 0));
  }

  function light() {
    const request = model.requests.get(shown.request);
    const live = request && !request.done ? request : null;
    device.light(live ? heldBy(live, "device") : null);
    swap.light(live ? heldBy(live, "swap") : null);
    showTables();
  }

  function showPool() {
    const { num_blocks, num_swap_blocks, block_size } = model.hello;
    deviceBlocks = feed.holders("device", num_blocks);
    device.update(num_blocks, deviceBlocks);
    byId("swap-place").hidden = num_swap_blocks === 0;
    byId("pool-columns").classList.toggle("has-swap", num_swap_blocks > 0);
    if (num_swap_blocks) {
      swapBlocks = feed.holders("swap", num_swap_blocks);
      swap.update(num_swap_blocks, swapBlocks);
    }
    const counts = model.frame.counts;
    const shared = deviceBlocks.filter((block) => block.holders.length > 1);
    const saved = shared.reduce((sum, block) => sum + block.holders.length - 1, 0);
    numbers(byId("pool-numbers"), [
      [counts.held, `of ${num_blocks} held`], [shared.length, "shared"], [saved, "saved by sharing"],
      [counts.cached, "free, cached"], [block_size, "tokens per block"],
    ]);
    setText(byId("swap-title"), `swap tier: ${counts.swap_held} of ${num_swap_blocks}`);
  }

  // Shows [[number, words], ...]; elements are reused, so that the layout does not jump.
  function numbers(place, pairs) {
    while (place.children.length < pairs.length) {
      const span = make("span");
      span.append(make("b"), document.createTextNode(""));
      place.append(span);
    }
    while (place.children.length > pairs.length) place.lastChild.remove();
    pairs.forEach(([number, words], i) => {
      setText(place.children[i].firstChild, String(number));
      if (place.children[i].lastChild.data !== ` ${words}`) place.children[i].lastChild.data = ` ${words}`;
    });
  }

  // ------------------------------------------------------------------ requests

  function rowOf(id) {
    const row = make("li");
    const button = make("button");
    button.type = "button";
    button.append(make("i"), make("span", "name"), make("span", "quiet small"));
    button.addEventListener("pointerenter", () => point(id));
    button.addEventListener("focus", () => point(id));
    button.addEventListener("pointerleave", () => point(shown.chosen));
    button.addEventListener("blur", () => point(shown.chosen));
    button.addEventListener("click", () => {
      shown.chosen = shown.chosen === id ? null : id;
      point(shown.chosen);
      showRequests();
    });
    row.append(button);
    row.dataset.id = id;
    return row;
  }

  function point(id) {
    shown.request = id;
    light();
  }

  function summary(request) {
    const parts = [request.done ? "finished" : request.state];
    if (request.sequences.length > 1) parts.push(`${request.sequences.length} ${request.method === "beam_search" ? "beams" : "samples"}`);
    const longest = Math.max(0, ...request.sequences.map((sequence) => sequence.tokens));
    parts.push(`${Math.max(longest, request.prompt_tokens)} tokens`);
    if (request.cached_tokens) parts.push(`${request.cached_tokens} from the cache`);
    if (request.preemptions) parts.push(`preempted ${request.preemptions}×`);
    return parts.join(" · ");
  }

  const ORDER = { running: 0, swapped: 1, waiting: 2 };

  function showRequests() {
    const list = byId("requests");
    const wanted = [...model.requests.values()].sort(
      (a, b) => a.done - b.done || (a.done ? 0 : ORDER[a.state] - ORDER[b.state])
    ).slice(0, 60);
    const rows = new Map([...list.children].map((row) => [row.dataset.id, row]));
    const ids = new Set(wanted.map((request) => request.id));
    for (const [id, row] of rows) if (!ids.has(id)) row.remove();
    wanted.forEach((request, i) => {
      const row = rows.get(request.id) || rowOf(request.id);
      if (list.children[i] !== row) list.insertBefore(row, list.children[i] || null);
      const button = row.firstChild;
      button.className = request.done ? "done" : "";
      button.style.setProperty("--hue", model.hue(request.id));
      button.setAttribute("aria-pressed", String(shown.chosen === request.id));
      setText(button.children[1], request.id);
      setText(button.children[2], summary(request));
    });
    byId("no-requests").hidden = wanted.length > 0;
    byId("table-of").hidden = wanted.length === 0;
    const { running, waiting, swapped } = model.frame.counts;
    numbers(byId("queues"), [[running, "running"], [waiting, "waiting"], [swapped, "swapped out"]]);
  }

  function showTables() {
    const place = byId("table-of");
    const request = model.requests.get(shown.request);
    if (!request) return;
    const key = JSON.stringify([request.id, request.done, request.sequences.map((s) => [s.index, s.tables])]);
    if (place.dataset.key === key) return;
    place.dataset.key = key;
    const parts = [make("p", "small quiet", `${request.id}: ${request.done ? "last known " : ""}block tables`)];
    for (const sequence of request.sequences.slice(0, 16)) {
      const chips = make("div", "chips");
      chips.append(make("span", "small quiet", `${sequence.index}${sequence.tier === "swap" ? " (swapped)" : ""}:`));
      sequence.tables.forEach((table, group) => {
        if (sequence.tables.length > 1) chips.append(make("span", "small quiet", `${model.hello.kv_group_names[group]}:`));
        for (const id of table) {
          const held = (sequence.tier === "swap" ? swapBlocks : deviceBlocks)[id];
          const shared = !request.done && held && held.holders.length > 1;
          chips.append(make("span", shared ? "chip mono shared" : "chip mono", id === 0 ? "–" : String(id)));
        }
      });
      parts.push(chips);
    }
    place.replaceChildren(...parts);
  }

  // ------------------------------------------------------------------ events and charts

  let lastEvent = 0;

  function showEvents() {
    const list = byId("events");
    for (const event of model.events.filter((one) => one.number > lastEvent).reverse()) {
      const row = make("li");
      row.append(
        make("span", "quiet mono", new Date(1000 * event.time).toTimeString().slice(0, 8)),
        make("span", `kind ${event.kind}`, event.title),
        make("span", "", event.text),
      );
      list.prepend(row);
      lastEvent = event.number;
    }
    while (list.children.length > 200) list.lastChild.remove();
    byId("no-events").hidden = list.children.length > 0;
  }

  const whole = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)}k` : value.toFixed(0));
  const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`);
  const percent = (value) => `${(100 * value).toFixed(0)} %`;
  const [A, B] = ["--series-a", "--series-b"];
  const charts = {
    tokens: makeChart(byId("chart-tokens"), [{ label: "output", color: A }, { label: "computed", color: B }], whole),
    latency: makeChart(byId("chart-latency"), [{ label: "first token", color: A }, { label: "between tokens", color: B }], seconds),
    hits: makeChart(byId("chart-hits"), [{ label: "cached", color: A }], percent),
    use: makeChart(byId("chart-use"), [{ label: "held", color: A }], percent),
  };
  let past = []; // frames of the last three seconds, from which rates are computed

  function showCharts() {
    const frame = model.frame, now = frame.totals;
    past = [...past.filter((one) => frame.time - one.time <= 3), frame];
    const first = past[0], then = first.totals;
    const elapsed = frame.time - first.time;
    if (elapsed < 0.2) return;
    const rate = (name) => Math.max(0, now[name] - then[name]) / elapsed;
    const median = (name) => quantile(frame.latency.bounds,
      frame.latency[name].map((count, i) => Math.max(0, count - first.latency[name][i])), 0.5);
    const looked = now.lookup_tokens - then.lookup_tokens;
    const hits = looked > 0 ? (now.hit_tokens - then.hit_tokens) / looked : null;
    const ttft = median("ttft"), itl = median("itl");
    const use = frame.counts.held / model.hello.num_blocks;
    const isUsed = now.computed_tokens > 0; // until then there is nothing to draw
    charts.tokens.add(frame.time, isUsed ? [rate("output_tokens"), rate("computed_tokens")] : [null, null]);
    charts.latency.add(frame.time, [ttft, itl]);
    charts.hits.add(frame.time, [hits]);
    charts.use.add(frame.time, [isUsed ? use : null]);
    setText(byId("v-output"), whole(rate("output_tokens")));
    setText(byId("v-computed"), whole(rate("computed_tokens")));
    if (ttft !== null) setText(byId("v-ttft"), seconds(ttft));
    if (itl !== null) setText(byId("v-itl"), seconds(itl));
    if (hits !== null) setText(byId("v-hits"), percent(hits));
    setText(byId("v-use"), percent(use));
  }

  feed.onFrame(() => {
    const { model: name, num_ranks } = model.hello;
    setText(byId("model"), num_ranks > 1 ? `${name}, shared by ${num_ranks} devices` : name);
    byId("model").title = `KV cache: ${model.hello.kv_groups}, ${model.hello.kv_cache_dtype}`;
    showPool();
    showRequests();
    light();
    showEvents();
    showCharts();
  });
})();
