// The conversation: settings, questions, answers, stop and race.

import { Answer, hideTree, watchTree } from "./answer.js";
import { ServerError, fetchModels, streamChat } from "./api.js";
import { addRow, clearTable, drawChart } from "./chart.js";
import { byId, element, plural } from "./dom.js";
import { addMedia, content, hasMedia, previews, takeMedia, watchMedia } from "./media.js";
import { Meter, times } from "./meter.js";

const KEY = "saccade-key", FIELDS = ["length", "temperature"], PLAIN = ["off", "plain"];
const history = []; // messages of this chat, as the API takes them
const plainRates = new Map(); // model -> tokens/s of its last plain answer
let models = [], running = null, turn = 0;
let follows = false; // whether the window follows the growing answer, until someone scrolls

const complain = (text) => {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
};
const focus = (id) => byId(id).focus({ preventScroll: true }); // the composer always shows
const announce = (text) => { byId("status").textContent = text; };

// -- settings ------------------------------------------------------------------------------------------------

const currentModel = () => models.find((model) => model.id === byId("model").value) ?? models[0];
const key = () => byId("key").value.trim();

function showSettings(isOpen) {
  byId("sheet").hidden = !isOpen;
  byId("settings").setAttribute("aria-expanded", isOpen);
}

// Whether a number can be used; if not, its field says what can be.
function isRight(id) {
  const field = byId(id), { valid } = field.validity, kind = field.step ? "number" : "whole number";
  field.setAttribute("aria-invalid", !valid);
  byId(`${id}-problem`).textContent = valid ? "" : `Give a ${kind} from ${field.min} to ${field.max}.`;
  return valid;
}

function option(value, text) {
  return element("option", { value }, text);
}

function showMethods() {
  const about = currentModel().saccade, lossy = new Set(about.lossy ?? []);
  const own = about.profiles.filter((name) => name !== "off");
  const named = about.methods.filter((name) => !PLAIN.includes(name));
  const groups = [
    ["Profiles", own],
    ["Lossless", named.filter((name) => !lossy.has(name))],
    ["Lossy: answers may differ", named.filter((name) => lossy.has(name))],
  ].filter(([, names]) => names.length);
  byId("method").replaceChildren(
    option("", `${about.method} (default)`), option("off", "off: plain decoding"),
    ...groups.map(([label, names]) => element("optgroup", { label }, names.map((name) => option(name, name)))));
  byId("method").disabled = false;
  byId("caveat").textContent = about.caveat ?? "";
  byId("caveat").hidden = !about.caveat;
  byId("length").max = currentModel().max_model_len ?? 100000;
  showLegend();
}

function showLegend() {
  const about = currentModel()?.saccade, name = byId("method").value;
  const isLossy = about && (name ? (about.lossy ?? []).includes(name) : !about.lossless);
  for (const item of document.querySelectorAll(".of-lossy")) item.hidden = !isLossy;
}

async function loadModels() {
  try {
    models = await fetchModels(key());
  } catch (problem) {
    complain(problem.message);
    if (problem.status === 401) {
      showSettings(true);
      byId("key").focus();
    }
    return;
  }
  complain("");
  const before = byId("model").value;
  byId("model").replaceChildren(...models.map((model) => option(model.id, model.id)));
  if (models.some((model) => model.id === before)) byId("model").value = before;
  byId("model-field").hidden = models.length < 2;
  showMethods();
}

function decoding() {
  const [max_tokens, temperature] = FIELDS.map((id) => byId(id).valueAsNumber);
  return { model: currentModel().id, max_tokens, temperature };
}

// -- answers -------------------------------------------------------------------------------------------------

function methodLabel(speculation) {
  if (PLAIN.includes(speculation)) return "plain";
  return speculation || currentModel().saccade.method;
}

function newAnswer(speculation) {
  const meter = new Meter(methodLabel(speculation));
  meter.isPlain = meter.method === "plain";
  meter.plain = plainRates.get(currentModel().id) ?? null;
  return new Answer(meter.method, meter);
}

// Stream one answer; returns whether it came to its end.
async function run(answer, request, speculation, meters, signal) {
  const asked = speculation ? { ...request, speculation } : request;
  let drawing = 0, reason = "";
  const redraw = () => {
    drawing = 0;
    drawChart(meters);
    if (follows) answer.note.scrollIntoView({ block: "nearest" });
  };
  try {
    for await (const chunk of streamChat(asked, key(), signal)) {
      answer.add(chunk, performance.now());
      drawing ||= requestAnimationFrame(redraw);
      if (chunk.choices?.[0]?.finish_reason === "length") reason = "length limit";
    }
    if (answer.meter.isPlain && answer.meter.rate) plainRates.set(request.model, answer.meter.rate);
    answer.finish(reason);
    return true;
  } catch (problem) {
    if (problem.name === "AbortError") answer.finish("stopped");
    else answer.fail(problem instanceof ServerError ? problem.message : `This page failed: ${problem.message}`);
    return false;
  } finally {
    cancelAnimationFrame(drawing);
    drawChart(meters);
    addRow(answer.meter);
    byId("hint").hidden = plainRates.has(request.model);
  }
}

const hasScreenKeyboard = () => matchMedia("(pointer: coarse)").matches; // it would cover the answer

function busy(controller) {
  running = controller;
  const isRunning = controller !== null;
  const hadFocus = ["send", "race", "stop"].includes(document.activeElement?.id);
  for (const id of ["model", "method", "new"]) byId(id).disabled = isRunning;
  for (const id of ["send", "race"]) byId(id).hidden = isRunning;
  byId("stop").hidden = !isRunning;
  const next = isRunning ? "stop" : hasScreenKeyboard() ? "send" : "text";
  if (hadFocus) focus(next);
}

function stop() {
  running?.abort();
}

function compare(plain, fast, request) {
  const same = plain.ids.length === fast.ids.length && plain.ids.every((id, place) => id === fast.ids[place]);
  const { method, speedUp } = fast.meter;
  const faster = speedUp === null ? "" : ` ${method}: ${times(speedUp)} the speed of plain decoding.`;
  if (same) return `Both answers are the same, token for token.${faster}`;
  const place = fast.ids.findIndex((id, number) => id !== plain.ids[number]);
  const why = request.temperature > 0 ? " Sampled answers may." : "";
  return `The answers differ from token ${(place < 0 ? fast.ids.length : place) + 1} on.${why}${faster}`;
}

async function ask(isRace) {
  const text = byId("text").value.trim();
  if (running || (!text && !hasMedia())) {
    focus("text");
    return;
  }
  if (!models.length) await loadModels();
  if (!models.length) return;
  const wrong = FIELDS.filter((id) => !isRight(id));
  if (wrong.length) {
    showSettings(true);
    byId(wrong[0]).focus();
    return;
  }
  complain("");
  const controller = new AbortController(), { signal } = controller;
  busy(controller);
  const files = takeMedia();
  byId("text").value = "";
  if (hasScreenKeyboard()) byId("text").blur();
  byId("welcome").hidden = true;
  const question = element("div", { class: "question" }, previews(files), element("p", {}, text));
  const lanes = element("div", { class: isRace ? "lanes two" : "lanes" });
  turn += 1;
  const section = element("section", { class: "turn", "aria-label": `Question ${turn}` },
    element("h2", { class: "unseen" }, `Question ${turn}`), question, lanes);
  byId("turns").append(section);
  announce("Answering");
  try {
    const message = { role: "user", content: await content(files, text) };
    const request = { ...decoding(), messages: [...history, message] };
    const chosen = byId("method").value;
    const other = PLAIN.includes(chosen) ? "" : chosen;
    const answers = isRace ? [newAnswer("off"), newAnswer(other)] : [newAnswer(chosen)];
    lanes.append(...answers.map((answer) => answer.element));
    section.scrollIntoView({ block: "start" });
    follows = true;
    let done = true;
    for (const [number, answer] of answers.entries()) {
      if (signal.aborted) answer.finish("stopped");
      else {
        answer.meter.plain = plainRates.get(request.model) ?? null;
        const speculation = isRace && number === 0 ? "off" : isRace ? other : chosen;
        done = (await run(answer, request, speculation, answers.map((one) => one.meter), signal)) && done;
      }
    }
    const last = answers.at(-1);
    if (isRace && done) {
      const verdict = compare(answers[0], last, request);
      section.append(element("p", { class: "verdict" }, verdict));
      announce(`${verdict} Answer: ${last.text}`);
    } else if (signal.aborted) announce("Stopped");
    else announce(last.text ? `Answer: ${last.text} ${plural(last.meter.tokens, "token")}.` : "No answer");
    if (last.text) history.push(message, { role: "assistant", content: last.text });
    else await restore(files, text);
  } catch (problem) {
    lanes.append(element("p", { class: "error", role: "alert" }, problem.message));
    await restore(files, text);
  } finally {
    resize(); // the question that came back takes room from what is shown
    const error = [...section.querySelectorAll(".error")].at(-1);
    if (error || follows) (error ?? section.lastElementChild).scrollIntoView({ block: "nearest" });
    busy(null);
  }
}

// Put a question that got no answer back, unless another one is being written.
async function restore(files, text) {
  if (byId("text").value || hasMedia()) return;
  byId("text").value = text;
  await addMedia(files);
}

function startOver() {
  history.length = 0;
  turn = 0;
  hideTree();
  for (const medium of byId("turns").querySelectorAll("img, video")) URL.revokeObjectURL(medium.src);
  byId("turns").replaceChildren();
  byId("welcome").hidden = false;
  clearTable();
  drawChart([]);
  focus("text");
}

// -- wiring --------------------------------------------------------------------------------------------------

async function add(files) {
  complain((await addMedia(files)).join(" "));
  focus("text");
}

// Keep what is scrolled to above the composer.
function resize() {
  document.documentElement.style.setProperty("--composer", `${byId("ask").offsetHeight}px`);
}

async function trySample() {
  const response = await fetch("sample.png");
  await addMedia([new File([await response.blob()], "bar chart", { type: "image/png" })]);
  byId("text").value = "Read the values from the bar chart.";
  focus("send");
}

byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, key());
  loadModels();
});
byId("model").addEventListener("change", showMethods);
byId("method").addEventListener("change", showLegend);
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(false);
});
byId("race").addEventListener("click", () => ask(true));
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", startOver);
byId("sample").addEventListener("click", trySample);
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask(event.ctrlKey || event.metaKey);
  }
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (!byId("tree").hidden) hideTree();
  else if (running) stop();
  else if (!byId("sheet").hidden) {
    showSettings(false);
    byId("settings").focus();
  }
});
byId("settings").addEventListener("click", () => showSettings(byId("sheet").hidden));
for (const id of FIELDS) byId(id).addEventListener("input", () => isRight(id));
new ResizeObserver(resize).observe(byId("ask"));
byId("speed").open = matchMedia("(min-width: 56.01rem)").matches; // it would push a phone's chat away
for (const moved of ["wheel", "touchmove"]) addEventListener(moved, () => { follows = false; }, { passive: true });
addEventListener("error", (event) => complain(`This page failed: ${event.message}`));
addEventListener("unhandledrejection", (event) => complain(`This page failed: ${event.reason}`));
watchTree();
watchMedia(add);
drawChart([]);
loadModels();
