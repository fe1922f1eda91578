// The conversation: questions, answers, stop, and two methods side by side.

import { hideTree, watchTree } from "./answer.js";
import { ServerError, streamChat } from "./api.js";
import { addRow, clearTable, drawChart } from "./chart.js";
import { announce, byId, plural } from "./dom.js";
import { showGallery } from "./gallery.js";
import { addMedia, content, hasMedia, takeMedia, watchMedia } from "./media.js";
import {
  areRight, currentModel, decoding, fault, isPlain, key, loadModels, showSettings, watchSettings,
} from "./settings.js";
import { dropTurns, keepTurn, restoreTurns } from "./store.js";
import { explain, waiting } from "./trouble.js";
import { Turn, newRecord } from "./turn.js";

const MOST_TRIES = 10;
const turns = [];
const plainRates = new Map(); // model -> tokens/s of its last plain answer
let running = null; // turn that is being answered, with its `stop`
let follows = false; // whether the window follows the growing answer, until someone scrolls

const focus = (id) => byId(id).focus({ preventScroll: true }); // the composer always shows

function complain(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

// Say what is wrong at its place, which is not an answer.
function complainAt(place, text) {
  if (place === "question" || place === "answer") complain(text);
  else fault(place, text);
  if (place === "question") focus("text");
}

// -- answers -------------------------------------------------------------------------------------------------

function account(answer, { model }) {
  if (answer.meter.isPlain && answer.meter.rate) plainRates.set(model, answer.meter.rate);
  addRow(answer.meter);
  byId("hint").hidden = plainRates.has(model);
}

function eventOf({ choices: [choice], saccade }) {
  const { content = "", reasoning_content: reasoning = "", tool_calls: calls = [] } = choice?.delta ?? {};
  const trace = saccade?.tokens?.length ? { tokens: saccade.tokens, tree: saccade.tree } : null;
  return { content, reasoning, calls, trace };
}

// Count down the seconds of a busy server.
async function pause(answer, problem, signal) {
  announce(waiting(problem, problem.retryAfter));
  for (let left = problem.retryAfter; left > 0 && !signal.aborted; left -= 1) {
    answer.note.textContent = waiting(problem, left);
    await new Promise((resolve) => {
      setTimeout(resolve, 1000);
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}

// Stream one answer, again and again while the server is busy.
async function stream(answer, request, signal, redraw) {
  for (let tries = 1; ; tries += 1) {
    try {
      for await (const chunk of streamChat(request, key(), signal)) {
        const event = eventOf(chunk);
        if (event.content || event.reasoning || event.calls.length || event.trace) answer.add(event, performance.now());
        redraw();
        if (chunk.choices[0]?.finish_reason === "length") answer.isCut = true;
      }
      return;
    } catch (problem) {
      if (!problem.retryAfter || tries === MOST_TRIES || answer.record.events.length) throw problem;
      await pause(answer, problem, signal);
    }
  }
}

// Answer one record of a turn; returns place and sentence of what went wrong, where that is not in the answer.
async function run(turn, place, messages, signal) {
  const answer = turn.answers[place], { request, records } = turn.data;
  const { speculation } = records[place], meters = turn.answers.map(({ meter }) => meter);
  answer.meter.plain = answer.record.plain = plainRates.get(request.model) ?? null;
  let drawing = 0;
  const redraw = () => {
    drawing ||= requestAnimationFrame(() => {
      drawing = 0;
      drawChart(meters);
      if (follows) answer.note.scrollIntoView({ block: "nearest" });
    });
  };
  try {
    await stream(answer, { ...request, messages, ...(speculation && { speculation }) }, signal, redraw);
    answer.finish(answer.isCut ? "length limit" : "");
    return null;
  } catch (problem) {
    if (problem.name === "AbortError") {
      answer.finish("stopped");
      return null;
    }
    const hasFiles = turns.some((one) => one.data.files.length);
    const [where, text] = problem instanceof ServerError
      ? explain(problem, { key: key(), length: request.max_tokens, hasFiles })
      : ["answer", `This page failed: ${problem.message}`];
    if (where !== "answer" && !turn.isAnswered) return [where, text];
    answer.fail(text);
    return null;
  } finally {
    cancelAnimationFrame(drawing);
    drawChart(meters);
    account(answer, request);
  }
}

const hasScreenKeyboard = () => matchMedia("(pointer: coarse)").matches; // it would cover the answer

function busy(turn) {
  running = turn;
  for (const one of turns) one.replay?.pause(); // which would slow the answer down
  const hadFocus = ["send", "race", "stop"].includes(document.activeElement?.id);
  for (const id of ["model", "method", "new"]) byId(id).disabled = Boolean(turn);
  for (const select of document.querySelectorAll(".lanes select")) select.disabled = Boolean(turn);
  for (const id of ["send", "race"]) byId(id).hidden = Boolean(turn);
  byId("stop").hidden = !turn;
  const next = turn ? "stop" : hasScreenKeyboard() ? "send" : "text";
  if (hadFocus) focus(next);
}

async function question({ files, text }) {
  return { role: "user", content: await content(files, text) };
}

// All messages up to the question of a turn.
async function conversation(turn) {
  const before = turns.slice(0, turns.indexOf(turn)).filter((one) => one.text);
  const pairs = before.map(async (one) => [await question(one.data), { role: "assistant", content: one.text }]);
  return [...(await Promise.all(pairs)).flat(), await question(turn.data)];
}

// Answer a turn's records at these places, one after the other.
async function answer(turn, places) {
  const controller = new AbortController(), { signal } = controller;
  turn.stop = () => controller.abort();
  turn.fill(places);
  busy(turn);
  announce("Answering");
  keep(turn);
  follows = true;
  let trouble = null;
  try {
    const messages = await conversation(turn);
    for (const place of places) {
      if (trouble || signal.aborted) turn.answers[place].finish("stopped");
      else trouble = await run(turn, place, messages, signal);
    }
  } catch (problem) {
    trouble = ["question", problem.message];
  }
  const { text } = turn, verdict = turn.compare();
  if (verdict) announce(`${verdict} Answer: ${text}`);
  else if (signal.aborted) announce("Stopped");
  else announce(text ? `Answer: ${text} ${plural(turn.answers.at(-1).meter.tokens, "token")}.` : "No answer");
  keep(turn);
  if (!turn.isAnswered) await giveBack(turn, trouble);
  resize(); // the question that came back takes room from what is shown
  const error = [...turn.element.querySelectorAll(".error")].at(-1);
  if (verdict && follows) turn.head.firstChild.scrollIntoView({ block: "start" });
  else if (error || follows) (error ?? turn.element.lastElementChild).scrollIntoView({ block: "nearest" });
  busy(null);
  if (verdict) turn.replay?.start();
  if (trouble) complainAt(...trouble);
}

function keep(turn) {
  keepTurn(turn.data.number, turn.data);
}

// Put a question that got no answer back, unless another one is being written; its turn stays where its error is.
async function giveBack(turn, trouble) {
  const { text, files, number } = turn.data;
  dropTurns(number);
  if (trouble) dropUnanswered();
  if (byId("text").value || hasMedia()) return;
  byId("text").value = text;
  await addMedia(files);
}

function dropUnanswered() {
  while (turns.length && !turns.at(-1).isAnswered) turns.pop().remove();
  byId("welcome").hidden = turns.length > 0;
}

function place(turn) {
  turns.push(turn);
  byId("turns").append(turn.element);
  byId("welcome").hidden = true;
}

async function ask(isRace) {
  await ready;
  const text = byId("text").value.trim();
  if (running || (!text && !hasMedia())) {
    focus("text");
    return;
  }
  if ((!currentModel() && !(await load())) || !areRight()) return;
  complain("");
  dropUnanswered();
  const files = takeMedia(), request = decoding(), chosen = byId("method").value;
  byId("text").value = "";
  if (hasScreenKeyboard()) byId("text").blur();
  const speculations = isRace ? ["off", isPlain(chosen) ? "" : chosen] : [chosen];
  const records = speculations.map((speculation) => newRecord(speculation, request.model));
  const number = (turns.at(-1)?.data.number ?? -1) + 1;
  const turn = new Turn({ number, text, files, request, records }, again);
  place(turn);
  const answering = answer(turn, [...records.keys()]);
  turn.element.scrollIntoView({ block: "start" });
  await answering;
}

// Answer one side of a turn again, by another method.
async function again(turn, at, speculation) {
  turn.data.records[at] = newRecord(speculation, turn.data.request.model);
  await answer(turn, [at]);
  turn.element.querySelectorAll(".lanes select")[at]?.focus({ preventScroll: true });
}

function startOver() {
  hideTree();
  for (const turn of turns.splice(0)) turn.remove();
  dropTurns();
  byId("welcome").hidden = false;
  clearTable();
  drawChart([]);
  focus("text");
}

// -- start ---------------------------------------------------------------------------------------------------

// Read the models; returns whether there are any.
async function load() {
  try {
    await loadModels();
    complain("");
    return true;
  } catch (problem) {
    complainAt(...explain(problem, { key: key() }));
    return false;
  }
}

async function restore() {
  for (const data of await restoreTurns()) {
    const turn = new Turn(data, again);
    turn.fill();
    if (!turn.isAnswered) {
      await giveBack(turn, null);
      continue;
    }
    place(turn);
    turn.compare();
    for (const one of turn.answers) account(one, data.request);
    drawChart(turn.answers.map(({ meter }) => meter));
  }
  if (turns.length) turns.at(-1).element.scrollIntoView({ block: "end" });
}

async function add(files) {
  complain((await addMedia(files, currentModel())).join("\n"));
  focus("text");
}

// Keep what is scrolled to above the composer.
function resize() {
  document.documentElement.style.setProperty("--composer", `${byId("ask").offsetHeight}px`);
}

watchSettings(load);
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(false);
});
byId("race").addEventListener("click", () => ask(true));
byId("stop").addEventListener("click", () => running?.stop());
byId("new").addEventListener("click", startOver);
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask(event.ctrlKey || event.metaKey);
  }
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (!byId("tree").hidden) hideTree();
  else if (running) running.stop();
  else if (!byId("sheet").hidden) {
    showSettings(false);
    byId("settings").focus();
  }
});
new ResizeObserver(resize).observe(byId("ask"));
byId("speed").open = matchMedia("(min-width: 56.01rem)").matches; // it would push a phone's chat away
for (const moved of ["wheel", "touchmove"]) addEventListener(moved, () => { follows = false; }, { passive: true });
addEventListener("pagehide", () => { if (running) keep(running); });
addEventListener("error", (event) => complain(`This page failed: ${event.message}`));
addEventListener("unhandledrejection", (event) => complain(`This page failed: ${event.reason}`));
watchTree();
watchMedia(add);
showGallery(add);
drawChart([]);
const ready = load().then(restore);
