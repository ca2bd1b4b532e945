// The state of one replica of the server, kept up to date from its stream of frames.

const feed = (() => {
  const MAX_FINISHED = 12; // finished requests that stay in the list
  const model = {
    hello: null, // {model, version, num_replicas, block_size, num_blocks, num_swap_blocks, kv_groups, kv_group_names, kv_cache_dtype}
    frame: null, // the latest one
    requests: new Map(), // id -> its latest update, `done` once it has finished
    cached: new Uint8Array(0), // by block id
    pins: {}, // name -> block ids
    events: [], // newest first, numbered
    hue: (id) => hues.get(id) ?? 175,
  };
  const hues = new Map();
  const listeners = [];
  const MAX_EVENTS = 200;
  let numSeen = 0, numEvents = 0;
  let abort = null;
  const number = new URLSearchParams(location.search).get("replica") || "0"; // the server checks it

  // A colour for each request; those of consecutive requests are far apart on the colour wheel.
  function giveHue(id) {
    if (!hues.has(id)) hues.set(id, Math.round((172 + 137.5 * numSeen++) % 360));
  }

  // `runs` are lengths of alternating runs of uncached and cached blocks, starting at the null block.
  function takeCached(runs) {
    const cached = new Uint8Array(model.hello.num_blocks + 1);
    let id = 0;
    runs.forEach((length, turn) => cached.fill(turn % 2, id, (id += length)));
    model.cached = cached;
  }

  function takeRequest(update) {
    giveHue(update.id);
    const known = model.requests.get(update.id);
    const before = new Map((known ? known.sequences : []).map((sequence) => [sequence.id, sequence]));
    for (const sequence of update.sequences) {
      // Each group's table arrives as [number of entries kept, new entries after them].
      const old = before.get(sequence.id);
      sequence.tables = sequence.tables.map(([kept, added], group) =>
        (kept ? old.tables[group].slice(0, kept) : []).concat(added));
      sequence.blocks = sequence.tables[0] || [];
    }
    update.sequences.sort((a, b) => a.index - b.index);
    model.requests.set(update.id, { ...update, done: false });
  }

  function forget(id) {
    model.requests.delete(id);
    hues.delete(id);
  }

  function forgetOld() {
    const done = [...model.requests.values()].filter((request) => request.done);
    for (const request of done.slice(0, Math.max(0, done.length - MAX_FINISHED))) forget(request.id);
  }

  function takeFrame(frame) {
    model.frame = frame;
    for (const update of frame.requests) takeRequest(update);
    for (const id of frame.gone) {
      const request = model.requests.get(id);
      if (request) request.done = true;
    }
    for (const id of frame.hidden) forget(id); // they are sent again if they come back
    if (frame.cached !== undefined) takeCached(frame.cached);
    if (frame.pins !== undefined) model.pins = frame.pins;
    if (frame.events.length) {
      for (const event of frame.events) event.number = ++numEvents;
      model.events = [...frame.events.reverse(), ...model.events].slice(0, MAX_EVENTS);
    }
    forgetOld();
    for (const listener of listeners) listener(model);
  }

  // The holders of each block of a tier, by block id; finished requests hold nothing.
  function holders(tier, numBlocks) {
    const blocks = Array.from({ length: numBlocks + 1 }, (_, id) => ({
      holders: [], pinned: null, cached: tier === "device" && model.cached[id] === 1,
    }));
    for (const request of model.requests.values()) {
      if (request.done) continue;
      for (const sequence of request.sequences) {
        if (sequence.tier !== tier) continue;
        sequence.tables.forEach((table, group) => table.forEach((id, index) => {
          if (id > 0 && blocks[id]) {
            blocks[id].holders.push({ request: request.id, hue: model.hue(request.id), sequence: sequence.index, index, group });
          }
        }));
      }
    }
    if (tier === "device") {
      for (const [name, ids] of Object.entries(model.pins)) {
        for (const id of ids) if (blocks[id]) blocks[id].pinned = name;
      }
    }
    return blocks;
  }

  // What to choose from, if there is a choice: each replica with its state and its open requests.
  function takeReplicas(states) {
    const menu = session.byId("replica");
    session.byId("replica-field").hidden = states.length < 2;
    while (menu.options.length < states.length) {
      const value = String(menu.options.length);
      menu.add(new Option("", value, false, value === number));
    }
    states.forEach(([state, numOpen], i) => {
      const words = [i, ...(state === "ready" ? [] : [state]), ...(numOpen ? [`${numOpen} open`] : [])];
      session.setText(menu.options[i], words.join(" · "));
    });
  }

  function setLink(text, className) {
    const pill = session.byId("link");
    session.setText(pill, text);
    pill.className = `pill ${className}`;
  }

  function take(name, data) {
    if (name === "hello") {
      model.hello = JSON.parse(data);
      model.requests.clear();
      hues.clear();
      setLink("live", "live");
    } else if (name === "frame") {
      const frame = JSON.parse(data);
      setLink("live", "live");
      takeReplicas(frame.replicas);
      takeFrame(frame);
    } else if (name === "lost") {
      const { replicas } = JSON.parse(data);
      takeReplicas(replicas);
      setLink(`engine ${replicas[Number(number)][0]}`, "lost");
    }
  }

  // Follows the server's feed, and reconnects after a pause when the connection is lost. A hidden page
  // disconnects, so that the server does no work for a page that is not visible.
  async function follow() {
    if (abort) abort.abort();
    if (document.hidden) return setLink("paused", "");
    const mine = (abort = new AbortController());
    while (!mine.signal.aborted) {
      try {
        await session.events(`/dashboard/feed?replica=${encodeURIComponent(number)}`, undefined, mine.signal, take);
        setLink("connection lost", "lost");
      } catch (error) {
        if (mine.signal.aborted) return;
        const final = { 400: error.message, 401: "not authorized: reload the page" }[error.status];
        setLink(final || "connection lost", "lost");
        if (final) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  }

  document.addEventListener("visibilitychange", follow);
  session.byId("replica").addEventListener("change", (event) => {
    location.search = `?replica=${event.target.value}`;
  });
  return { model, holders, follow, onFrame: (listener) => listeners.push(listener) };
})();
