// A server's refusal in a user's words, with the place on the page where it belongs.

const FIELDS = {
  max_tokens: "length", temperature: "temperature", speculation: "method", "speculation.method": "method",
};

const STRANGE = [405, 415, 422]; // statuses that this page gives no reason for

const millions = (text) => Number(text.replaceAll(",", "")) / 1e6;

// The API's words for what a user sees as pictures.
function inPictures(message) {
  return message
    .replace(/ in the data: URI| data: URI/g, "")
    .replace(/ or load a VLM/, "")
    .replace(/\b(a|A)n image/g, "$1 picture")
    .replace(/\b(i|I)mage/g, (_, sign) => (sign === "i" ? "picture" : "Picture"))
    .replace(/([\d,]{7,}) bytes/g, (_, count) => `${Math.floor(millions(count))} MB`)
    .replace(/([\d,]{7,}) pixels/g, (_, count) => `${Math.floor(millions(count))} million pixels`);
}

function tooLong(problem, length) {
  const [, needed, context] = problem.message.match(/needs (\d+) tokens .* context is (\d+)/) ?? [];
  const left = context - (needed - length);
  if (left >= 1) return ["length", `The model has room for ${left} tokens of an answer here; give that or less.`];
  const of = context ? ` of ${context} tokens` : "";
  return ["question", `This is longer than the model’s context${of}; shorten it, or start a new chat.`];
}

// Place and sentence: `question` is the composer, `answer` the answer itself, other places are settings.
export function explain(problem, { key, length, hasFiles }) {
  const { status, code, param, message } = problem;
  if (status === 401) {
    return ["key", key ? "The server does not know this key; correct it." : "This server needs an API key; give it."];
  }
  if (status === 413) {
    const [size] = message.match(/\d+ MiB/) ?? ["the limit"];
    return ["question", `The conversation with its pictures is larger than ${size}, the most that this server takes; `
      + "send smaller pictures, or start a new chat."];
  }
  if (STRANGE.includes(status)) {
    return ["answer", "The server does not understand this page; reload the page, then ask again."];
  }
  if (code === "model_not_found") return ["model", "This model is no longer served; choose another."];
  if (code === "context_length_exceeded") return tooLong(problem, length);
  if (status === 400 && param in FIELDS) {
    return [FIELDS[param], message.replace("lower max_tokens", "give that or less")];
  }
  if (status === 400 && /^The text /.test(message)) return ["question", message];
  if (status === 400 && hasFiles && /\b(image|video|frame)/i.test(message)) return ["question", inPictures(message)];
  return ["answer", message];
}

// Why the page waits before it asks again.
export function waiting(problem, seconds) {
  const why = problem.status === 429 ? "These are more questions than the server takes from one sender"
    : problem.code === "shutting_down" ? "The server is about to restart" : "The server is busy";
  return `${why}; it is asked again in ${seconds} s.`;
}
