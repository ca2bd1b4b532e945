// The playground: a request like any client's, its outputs as they arrive, and its blocks as a tree.

(() => {
  const { byId, make, setText } = session;
  const MAX_ECHO = 60; // characters
  const tree = makeTree(byId("tree"));
  const EXAMPLE = {
    question: "What is the weather like in Paris?",
    tools: [
      tool("get_weather", "Get the current weather in a city.", { city: { type: "string" } }),
      tool("calculate", "Evaluates an expression.", { expression: { type: "string" } }),
    ],
  };
  let running = null; // {id, abort, ...} of the current request
  let latest = null; // id of the request whose tree is shown
  let widest = 0; // sequences in the tree that is shown

  function kind() {
    return document.querySelector("input[name=kind]:checked").value;
  }

  function tool(name, description, properties) {
    const parameters = { type: "object", properties, required: Object.keys(properties) };
    return { type: "function", function: { name, description, parameters } };
  }

  // What a field of JSON holds; undefined if it is empty.
  function json(id) {
    const text = byId(id).value.trim();
    try {
      return text ? JSON.parse(text) : undefined;
    } catch (error) {
      throw new Error(`${id}: ${error.message}`);
    }
  }

  // A message with the prompt, or `messages` of a chat that goes on after a call.
  function body(messages) {
    const n = Number(byId("n").value);
    const beam = byId("method").value === "beam";
    const common = {
      max_tokens: Number(byId("max-tokens").value), stream: true, stream_options: { include_usage: true }, n,
      ...(beam ? { beam_width: n } : { temperature: Number(byId("temperature").value) }),
    };
    const schema = json("schema");
    if (schema !== undefined) common.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    const prompt = byId("prompt").value;
    if (!messages && kind() === "completion") return ["/v1/completions", { ...common, prompt }];
    const chat = messages || [{ role: "user", content: prompt }];
    return ["/v1/chat/completions", { ...common, messages: chat, tools: json("tools") }];
  }

  // The end of the prompt, to show what an output continues.
  function echo(prompt) {
    if (prompt.length <= MAX_ECHO) return prompt;
    return `… ${prompt.slice(-MAX_ECHO).replace(/^\S*\s/, "")}`;
  }

  // One box for each output, after those of the chat so far; boxes stay while text arrives, so that
  // the layout does not jump.
  function answerBox(index) {
    const place = byId("answers");
    while (place.children.length <= running.before + index) {
      const box = make("div", "answer");
      box.style.setProperty("--hue", feed.model.hue(latest));
      if (kind() === "completion") box.append(make("span", "prompt-echo", echo(byId("prompt").value)));
      box.append(make("span", "said"));
      place.append(box);
    }
    place.classList.toggle("several", place.children.length > running.before + 1);
    return place.children[running.before + index];
  }

  // A part of a call: the first has its id and name, all of them some of its arguments.
  function takeCall(index, part) {
    const calls = (running.calls[index] ||= []);
    if (!calls[part.index]) {
      calls[part.index] = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
      answerBox(index).append(make("code", "call"));
    }
    const made = calls[part.index].function;
    made.arguments += part.function.arguments || "";
    setText(answerBox(index).querySelectorAll(".call")[part.index], `${made.name}(${made.arguments})`);
  }

  // Fields for the results of an output's calls, with which the chat goes on from this output.
  function askForResults(run, index) {
    const box = answerBox(index);
    const calls = run.calls[index];
    const form = make("form", "row");
    const inputs = calls.map((call) => {
      const label = make("label", "field", `Result of ${call.function.name}`);
      const input = make("input");
      input.required = true;
      label.append(input);
      form.append(label);
      return input;
    });
    form.append(make("button", "", "Give result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (running) return;
      const results = calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: inputs[i].value }));
      const said = box.querySelector(".said").textContent;
      for (const result of results) form.before(make("code", "result", `→ ${result.content}`));
      form.remove();
      const others = [...byId("answers").children].slice(run.before).filter((other) => other !== box);
      for (const other of others) other.remove();
      start([...run.messages, { role: "assistant", content: said, tool_calls: calls }, ...results]);
    });
    box.append(form);
  }

  function take(data) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const now = performance.now();
    for (const choice of chunk.choices) {
      const text = choice.delta ? choice.delta.content : choice.text;
      const calls = (choice.delta && choice.delta.tool_calls) || [];
      if (choice.finish_reason === "tool_calls") running.called.push(choice.index);
      if (!text && !calls.length) continue;
      running.first = running.first || now;
      running.last = now;
      if (text) answerBox(choice.index).querySelector(".said").append(text);
      for (const part of calls) takeCall(choice.index, part);
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

  // Sends what the form says; with `messages`, the chat goes on below what is shown of it.
  async function start(messages) {
    if (running) return;
    const id = `play-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    if (!messages) byId("answers").replaceChildren();
    const mine = (running = {
      id, abort: new AbortController(), start: performance.now(), first: 0, usage: null,
      before: byId("answers").children.length, calls: {}, called: [],
    });
    latest = id;
    widest = 0;
    byId("run").disabled = true;
    byId("stop").disabled = false;
    byId("play-empty").hidden = true;
    setText(byId("play-error"), "");
    setText(byId("play-numbers"), "");
    try {
      const [path, values] = body(messages);
      mine.messages = values.messages;
      await session.events(path, values, mine.abort.signal, (name, data) => take(data), { "X-Request-Id": id });
      showNumbers(mine);
      for (const index of mine.called) askForResults(mine, index);
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
    start();
  });
  byId("stop").addEventListener("click", () => running && running.abort.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
  });
  for (const input of document.querySelectorAll("input[name=kind]")) {
    input.addEventListener("change", () => (byId("tools-field").hidden = kind() !== "chat"));
  }
  byId("example").addEventListener("click", () => {
    document.querySelector("input[name=kind][value=chat]").click();
    byId("prompt").value = EXAMPLE.question;
    byId("tools").value = `[${EXAMPLE.tools.map((each) => JSON.stringify(each)).join(",\n")}]`;
    byId("n").value = 1;
    byId("temperature").value = 0;
  });
  byId("method").addEventListener("change", () => {
    const beam = byId("method").value === "beam";
    setText(byId("n-label"), beam ? "Beams" : "Samples");
    byId("temperature-field").hidden = beam;
  });
  feed.onFrame(showTree);
  feed.follow();
})();
