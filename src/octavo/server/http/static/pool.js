// The pool driven by hand. The state is a list of operations, which the server replays from the start
// on the real KV cache manager after each change; undo drops the last operation.

(() => {
  const { byId, make, setText } = session;
  const tree = makeTree(byId("tree"));
  let operations = [];
  let state = null;
  let lesson = null; // the textbook case, if it is shown
  let chapter = ""; // chapter of the lesson: "count", then "fork", then "write"
  let pointed = null; // name of the sequence under the pointer
  let busy = Promise.resolve();

  // The colour of a sequence; a name always gets the same one.
  function hue(name) {
    const letter = name.charCodeAt(0) - 65 + 26 * (Number(name.slice(1)) || 0);
    return Math.round((172 + 137.5 * letter) % 360);
  }

  // Changes are sent one after the other, however fast the user clicks.
  function change(next, newChapter = "") {
    busy = busy.then(async () => {
      const changed = next(operations);
      try {
        const response = await session.call("/pool/play", { operations: changed });
        state = await response.json();
        operations = changed;
        chapter = newChapter;
        setText(byId("error"), "");
        show();
      } catch (error) {
        setText(byId("error"), error.message.replace(/^operations\[\d+\]\.\w+: /, ""));
      }
    });
    return busy;
  }

  const act = (operation) => change((done) => [...done, operation]);

  async function playTextbook() {
    try {
      const response = await session.call("/pool/textbook");
      lesson = await response.json();
      await change(() => lesson.operations, "count");
    } catch (error) {
      setText(byId("error"), error.message);
    }
  }

  // ------------------------------------------------------------------ the pool

  function makeBlocks() {
    const grid = byId("blocks");
    for (let first = 1; first <= 64; first += 8) {
      const row = make("div", "block-row");
      row.setAttribute("role", "row");
      for (let id = first; id < first + 8; id++) {
        const cell = make("div", "block");
        cell.setAttribute("role", "gridcell");
        cell.tabIndex = id === 1 ? 0 : -1;
        cell.dataset.id = id;
        cell.append(make("i"), make("span"));
        row.append(cell);
      }
      grid.append(row);
    }
    grid.addEventListener("keydown", (event) => {
      const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
      const id = Number(document.activeElement.dataset.id);
      if (!(event.key in steps) || !id) return;
      event.preventDefault();
      const cells = [...grid.querySelectorAll(".block")];
      const next = cells[Math.min(64, Math.max(1, id + steps[event.key])) - 1];
      for (const cell of cells) cell.tabIndex = cell === next ? 0 : -1;
      next.focus();
    });
  }

  function showBlocks() {
    const held = new Map(state.blocks.map((block) => [block.id, block]));
    const fresh = new Set(state.events.filter((event) => event.kind === "take" || event.kind === "copy").map((event) => event.block));
    for (const cell of byId("blocks").querySelectorAll(".block")) {
      const id = Number(cell.dataset.id);
      const block = held.get(id);
      const holders = block ? block.holders : [];
      cell.className = "block" + (holders.length > 1 ? " shared" : "") + (fresh.has(id) ? " fresh" : "") +
        (pointed && !holders.includes(pointed) ? " dim" : "");
      cell.firstChild.style.width = block ? `${(100 * block.filled) / state.block_size}%` : "0";
      if (block) cell.style.setProperty("--hue", hue(holders[0]));
      setText(cell.lastChild, holders.length > 1 ? String(block.ref_count) : "");
      cell.setAttribute("aria-label", block
        ? `block ${id}: held by ${holders.join(", ")}; ${block.filled} of ${state.block_size} tokens`
        : `block ${id}: free`);
      cell.title = cell.getAttribute("aria-label");
    }
    const shared = state.blocks.filter((block) => block.ref_count > 1).length;
    setText(byId("pool-numbers"),
      `${state.num_held} held · ${shared} shared · ${state.num_free} free · ${state.num_copies} copied on write`);
  }

  // ------------------------------------------------------------------ the sequences

  function button(text, label, onClick) {
    const made = make("button", "", text);
    made.type = "button";
    made.setAttribute("aria-label", label);
    made.addEventListener("click", onClick);
    return made;
  }

  function sequenceRow(name) {
    const row = make("li");
    row.dataset.name = name;
    row.style.setProperty("--hue", hue(name));
    const count = make("input");
    count.type = "number";
    count.min = 1;
    count.max = 1024;
    count.value = 16;
    count.setAttribute("aria-label", `tokens to append to ${name}`);
    const acts = make("div", "acts");
    acts.append(
      count,
      button("Append", `append tokens to ${name}`, () => act({ op: "append", sequence: name, tokens: Number(count.value) })),
      button("Fork", `fork ${name}`, () => act({ op: "fork", sequence: name, times: 1 })),
      button("Fork × 3", `fork ${name} three times`, () => act({ op: "fork", sequence: name, times: 3 })),
      button("Rewrite last token", `rewrite the last token of ${name}`, () => act({ op: "rewrite", sequence: name })),
      button("Free", `free ${name}`, () => act({ op: "free", sequence: name })),
    );
    const what = make("div", "what");
    what.append(make("b", "", name), make("span", "quiet small"));
    row.append(what, acts);
    const point = (to) => () => {
      pointed = to;
      showBlocks();
    };
    row.addEventListener("pointerenter", point(name));
    row.addEventListener("pointerleave", point(null));
    row.addEventListener("focusin", point(name));
    row.addEventListener("focusout", point(null));
    return row;
  }

  function showSequences() {
    const list = byId("sequences");
    const rows = new Map([...list.children].map((row) => [row.dataset.name, row]));
    const alive = new Set(state.sequences.map((sequence) => sequence.name));
    for (const [name, row] of rows) {
      if (!alive.has(name)) {
        if (pointed === name) pointed = null;
        const hadFocus = row.contains(document.activeElement);
        row.remove();
        if (hadFocus) byId("new").focus();
      }
    }
    for (const sequence of state.sequences) {
      const row = rows.get(sequence.name) || sequenceRow(sequence.name);
      if (!row.parentElement) list.append(row);
      const from = sequence.parent ? ` · forked from ${sequence.parent}` : "";
      setText(row.firstChild.lastChild, `${sequence.num_tokens} tokens in ${sequence.block_ids.length} blocks${from}`);
    }
    byId("hint").hidden = state.sequences.length > 0;
    byId("undo").disabled = byId("reset").disabled = operations.length === 0;
  }

  // ------------------------------------------------------------------ the numbers

  const DESCRIPTIONS = {
    take: (event) => `${event.sequence} allocates block ${event.block}`,
    copy: (event) => `copy-on-write: ${event.sequence} copies block ${event.source} into block ${event.block}`,
    fork: (event) => `${event.sequence} shares all blocks of ${event.parent}`,
    release: (event) => `${event.sequence} releases block ${event.block}, which has other holders`,
    free: (event) => `block ${event.block} is free`,
  };

  function showNumbers() {
    setText(byId("paged"), String(state.num_held));
    setText(byId("naive"), String(state.num_naive));
    const most = Math.max(1, state.num_held, state.num_naive);
    byId("paged-bar").style.width = `${(100 * state.num_held) / most}%`;
    byId("naive-bar").style.width = `${(100 * state.num_naive) / most}%`;
    const lines = state.events.slice(0, 8).map((event) => DESCRIPTIONS[event.kind](event));
    if (state.events.length > 8) lines.push(`and ${state.events.length - 8} more`);
    const idle = operations.length ? "No block changed." : "Nothing has happened yet.";
    setText(byId("happened"), lines.length ? `${lines.join("; ")}.` : idle);
    const body = byId("history");
    body.replaceChildren(...state.history.map((count) => {
      const row = make("tr");
      row.append(make("td", "", count.label), make("td", "", String(count.held)), make("td", "", String(count.naive)));
      return row;
    }));
    body.closest(".history").scrollTop = body.closest(".history").scrollHeight;
  }

  // The paragraphs and the buttons of each chapter of the textbook case.
  const CHAPTERS = {
    count() {
      const beams = lesson.num_beams;
      const first = make("p");
      first.append(
        "Textbooks count ", make("strong", "", `${lesson.paged} against ${lesson.naive}`),
        `: ${lesson.prompt_blocks} shared blocks for the prompt and ${lesson.blocks_per_beam} reserved for each of ${beams} beams ` +
        `(${lesson.prompt_blocks} + ${beams} × ${lesson.blocks_per_beam}), against ${beams} copies of the prompt alone ` +
        `(${beams} × ${lesson.prompt_blocks}).`,
      );
      const tokens = state.sequences[0].num_tokens - lesson.prompt_tokens;
      const second = make("p", "small quiet",
        `octavo allocates a block only when a token needs it: with ${tokens} tokens each the beams really hold ` +
        `${state.num_held}. Without sharing, the beams' own tokens take blocks as well, so naive is ${state.num_naive}.`);
      const more = button("Append 10 more to each beam", "append 10 more tokens to each beam", () => change((done) => [
        ...done, ...state.sequences.map((sequence) => ({ op: "append", sequence: sequence.name, tokens: 10 }))], "count"));
      const next = button("Next: beam A is continued twice", "next: drop beam D, continue beam A twice",
        () => change((done) => [...done, ...lesson.fork], "fork"));
      return { paragraphs: [first, second], buttons: state.num_held < lesson.paged ? [next, more] : [next] };
    },
    fork() {
      const { block, filled } = lastBlock();
      const first = make("p", "",
        "Beam search drops its worst beam and continues the best one twice: D is freed, and E starts as a fork of A. " +
        `Nothing was computed or copied for that: A and E share even their last block, ${block}, of which ${filled} of ${state.block_size} tokens are written.`);
      const next = button("Next: E appends a token", "next: append a token to E",
        () => change((done) => [...done, ...lesson.write], "write"));
      return { paragraphs: [first], buttons: [next] };
    },
    write() {
      const { block } = lastBlock();
      const first = make("p");
      first.append(
        "E's next token goes into a block that A holds, too. So E first got a copy of that block, ",
        make("strong", "", `${lesson.shared} → ${block}`),
        ": copy-on-write, figures 8 and 9 of the paper. All earlier blocks stay shared, and A, now the only holder of " +
        `block ${lesson.shared}, will append to it without a copy.`);
      return { paragraphs: [first], buttons: [] };
    },
  };

  // The last block of the newest sequence, and the number of tokens written in it.
  function lastBlock() {
    const { block_ids, num_tokens } = state.sequences[state.sequences.length - 1];
    return { block: block_ids[block_ids.length - 1], filled: num_tokens - (block_ids.length - 1) * state.block_size };
  }

  function showLesson() {
    const place = byId("lesson");
    place.hidden = !chapter;
    if (!chapter) return;
    if (chapter === "fork") lesson.shared = lastBlock().block;
    const hadFocus = place.contains(document.activeElement);
    const { paragraphs, buttons } = CHAPTERS[chapter]();
    place.replaceChildren(...paragraphs);
    if (!buttons.length) return;
    const row = make("div", "row");
    row.append(...buttons);
    place.append(row);
    if (hadFocus) buttons[0].focus();
  }

  function show() {
    showSequences();
    showBlocks();
    showNumbers();
    showLesson();
    tree.draw(state.sequences.map((sequence) => ({
      label: sequence.name, tokens: sequence.num_tokens, blocks: sequence.block_ids,
    })), state.block_size, 172);
  }

  makeBlocks();
  byId("textbook").addEventListener("click", playTextbook);
  byId("new").addEventListener("click", () => act({ op: "new" }));
  byId("undo").addEventListener("click", () => change((done) => done.slice(0, -1)));
  byId("reset").addEventListener("click", () => change(() => []));
  change((done) => done);
})();
