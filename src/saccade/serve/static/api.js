// Requests to the server of this page.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message.replace(" in the data: URI", ""));  // the API's word for a file of this page
    this.status = status;
  }
}

function headers(key) {
  const all = { "content-type": "application/json" };
  if (key) all.authorization = `Bearer ${key}`;
  return all;
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "omit", redirect: "error", ...options });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    const cause = options.body ? ", or takes no question of this size" : "";
    throw new ServerError(`The server does not answer${cause}; check that it runs, then try again.`);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  throw new ServerError(message, response.status);
}

// Models with their methods, as /v1/models lists them.
export async function fetchModels(key) {
  const response = await send("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

// Chunks of a streamed chat completion with its trace.
export async function* streamChat(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, saccade: { trace: true } });
  const response = await send("v1/chat/completions", { method: "POST", headers: headers(key), body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new ServerError("The connection broke in the middle of the answer; ask again.");
    }
    if (part.done) throw new ServerError("The answer ended early; ask again.");
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  }
}
