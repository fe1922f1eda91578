// Requests to the server of this page.

export class ServerError extends Error {
  // `error` as the API has it; seconds after which a repetition may help, 0 where it would not
  constructor(message, status = 0, error = {}, retryAfter = 0) {
    super(message);
    this.status = status;
    this.code = error.code ?? "";
    this.param = error.param ?? "";
    this.retryAfter = retryAfter;
  }
}

const BUSY = [429, 503], RETRY_SECONDS = 2, LEAVING = 500, LARGE = 2 ** 22;

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
    const cause = options.body?.length > LARGE ? ", or does not take this much at once" : "";
    throw new ServerError(`The server does not answer${cause}; check that it runs, then ask again.`);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null), { status } = response;
  const message = body?.error?.message ?? `The server answered with status ${status}; ask again later.`;
  const wait = Number(response.headers.get("retry-after")) || RETRY_SECONDS;
  throw new ServerError(message, status, body?.error ?? {}, BUSY.includes(status) ? wait : 0);
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
      await new Promise((resolve) => setTimeout(resolve, LEAVING)); // where the page is being left, nothing follows
      throw new ServerError("The connection broke in the middle of the answer; ask again.");
    }
    if (part.done) throw new ServerError("The answer ended early; ask again.");
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, 0, chunk.error);
      yield chunk;
    }
  }
}
