// The playground: a request like any client's, its outputs as they arrive, and its blocks as a tree.

(() => {
  const { byId, make, setText } = session;
  const MAX_ECHO = 60; // characters
  const tree = makeTree(byId("tree"));
  let running = null; // {id, abort, ...} of the current request
  let latest = null; // id of the request whose tree is shown
  let widest = 0; // sequences in the tree that is shown

  function kind() {
    return document.querySelector("input[name=kind]:checked").value;
  }

  function body() {
    const n = Number(byId("n").value);
    const beam = byId("method").value === "beam";
    const common = {
      max_tokens: Number(byId("max-tokens").value), stream: true, stream_options: { include_usage: true }, n,
      ...(beam ? { beam_width: n } : { temperature: Number(byId("temperature").value) }),
    };
    const prompt = byId("prompt").value;
    if (kind() === "chat") return ["/v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }] }];
    return ["/v1/completions", { ...common, prompt }];
  }

  // The end of the prompt, to show what an output continues.
  function echo(prompt) {
    if (prompt.length <= MAX_ECHO) return prompt;
    return `… ${prompt.slice(-MAX_ECHO).replace(/^\S*\s/, "")}`;
  }

  // One box for each output; boxes stay while text arrives, so that the layout does not jump.
  function answerBox(index) {
    const place = byId("answers");
    while (place.children.length <= index) {
      const box = make("div", "answer");
      box.style.setProperty("--hue", feed.model.hue(latest));
      if (kind() === "completion") box.append(make("span", "prompt-echo", echo(byId("prompt").value)));
      box.append(make("span"));
      place.append(box);
    }
    place.classList.toggle("several", place.children.length > 1);
    return place.children[index].lastChild;
  }

  function take(data) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const now = performance.now();
    for (const choice of chunk.choices) {
      const text = choice.delta ? choice.delta.content : choice.text;
      if (!text) continue;
      running.first = running.first || now;
      running.last = now;
      answerBox(choice.index).append(text);
    }
    if (chunk.usage) running.usage = chunk.usage;
  }

  function showNumbers(run) {
    const usage = run.usage;
    if (!usage || !run.first) return;
    const details = usage.prompt_tokens_details || {};
    const elapsed = (performance.now() - run.start) / 1000;
    const parts = [
      `${usage.prompt_tokens} prompt tokens, ${details.cached_tokens || 0} from the cache`,
      `${usage.completion_tokens} generated`,
      `first token after ${(run.first - run.start).toFixed(0)} ms`,
      `${Math.round(usage.completion_tokens / elapsed)} tokens/s`,
    ];
    setText(byId("play-numbers"), parts.join(" · "));
  }

  async function run() {
    if (running) return;
    const id = `play-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    const mine = (running = { id, abort: new AbortController(), start: performance.now(), first: 0, usage: null });
    latest = id;
    widest = 0;
    byId("run").disabled = true;
    byId("stop").disabled = false;
    byId("answers").replaceChildren();
    byId("play-empty").hidden = true;
    setText(byId("play-error"), "");
    setText(byId("play-numbers"), "");
    try {
      const [path, values] = body();
      await session.events(path, values, mine.abort.signal, (name, data) => take(data), { "X-Request-Id": id });
      showNumbers(mine);
    } catch (error) {
      if (error.name !== "AbortError") setText(byId("play-error"), error.message);
    }
    running = null;
    byId("run").disabled = false;
    byId("stop").disabled = true;
  }

  // The blocks of the request in the latest frame; the frame with the most sequences stays.
  function showTree() {
    const request = feed.model.requests.get(latest);
    if (!request || request.done) return;
    const sequences = request.sequences.filter((sequence) => sequence.blocks.length);
    if (sequences.length === 0 || sequences.length < widest) return;
    widest = sequences.length;
    byId("tree-place").hidden = false;
    const word = request.method === "beam_search" ? "beam" : "sample";
    const entries = sequences.flatMap((sequence) => sequence.blocks);
    setText(byId("tree-title"), `${sequences.length} ${word}${sequences.length > 1 ? "s" : ""} hold ` +
      `${new Set(entries).size} blocks; without sharing they would hold ${entries.length}`);
    tree.draw(sequences.map((sequence) => ({
      label: String(sequence.index), tokens: sequence.computed, blocks: sequence.blocks,
    })), feed.model.hello.block_size, feed.model.hue(latest));
    for (const box of byId("answers").children) box.style.setProperty("--hue", feed.model.hue(latest));
  }

  byId("play-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  byId("stop").addEventListener("click", () => running && running.abort.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  });
  byId("method").addEventListener("change", () => {
    const beam = byId("method").value === "beam";
    setText(byId("n-label"), beam ? "Beams" : "Samples");
    byId("temperature-field").hidden = beam;
  });
  feed.onFrame(showTree);
  feed.follow();
})();
