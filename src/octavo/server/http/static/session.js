// How both pages call the server: JSON calls and streams of server-sent events. If a key is needed,
// the browser has asked for it before it showed the page, and sends it with every call.

const session = (() => {
  function byId(id) {
    return document.getElementById(id);
  }

  // An Error with the server's message and status.
  async function failure(response) {
    let message = `the server answered ${response.status}`;
    try {
      const body = await response.json();
      if (body.error && body.error.message) message = body.error.message;
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
    const failed = new Error(message);
    failed.status = response.status;
    return failed;
  }

  async function call(path, body, signal, headers = {}) {
    const post = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    const response = await fetch(path, {
      ...post,
      signal,
      cache: "no-store",
      headers: body === undefined ? headers : { ...headers, "Content-Type": "application/json" },
    });
    if (!response.ok) throw await failure(response);
    return response;
  }

  // Calls `onEvent(name, data)` for every event until the stream ends.
  async function events(path, body, signal, onEvent, headers) {
    const response = await call(path, body, signal, headers);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        let name = "message";
        const data = [];
        for (const line of part.split(/\r?\n/)) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        }
        if (data.length) onEvent(name, data.join("\n"));
      }
    }
  }

  // An element with text; text never becomes markup.
  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Changes the document only if the text differs, so that nothing flickers or is read out twice.
  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  return { call, events, make, setText, byId };
})();
