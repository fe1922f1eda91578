// An answer: its tokens with their marks, step by step, and the draft tree of the step under the pointer.

import { announce, byId, element, plural } from "./dom.js";
import { Meter, rounded, times } from "./meter.js";
import { describe, drawTree } from "./tree.js";

const MARKS = new Set(["target", "draft", "loose", "shifted"]);
const FRAME = 60; // pixels of the tree's panel around the tree

export class Answer {
  // `record`: what is kept of an answer, its events with their times in milliseconds among it
  constructor(record, isPlain) {
    const { method } = record;
    this.record = record;
    this.meter = new Meter(method);
    this.meter.isPlain = isPlain;
    this.meter.plain = record.plain;
    this.text = "";
    this.ids = [];
    this.steps = [];
    this.folds = new Map(); // name -> folded part
    this.calls = [];
    this.tokens = element("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": `Answer of ${method}`,
    });
    this.note = element("p", { class: "note" }, "waiting");
    this.title = element("h3", {}, method);
    this.element = element("article", { class: "answer", "aria-label": method, "aria-busy": "true" },
      this.title, this.tokens, this.note);
    this.current = -1;
    this.element.addEventListener("pointerover", (event) => this.#point(event.target));
    this.element.addEventListener("click", (event) => this.#point(event.target));
    this.element.addEventListener("pointerleave", hideTree);
    this.tokens.addEventListener("blur", (event) => {
      if (!byId("tree").contains(event.relatedTarget)) hideTree();
    });
    this.tokens.addEventListener("keydown", (event) => this.#move(event));
    for (const [at, event] of record.events) this.#show(event, at);
  }

  // Take an event that has just arrived.
  add(event, now) {
    this.record.events.push([now, event]);
    this.#show(event, now);
  }

  // End the answer; `reason` in a few words where it did not end by itself.
  finish(reason = "") {
    this.record.end = reason;
    this.element.removeAttribute("aria-busy");
    this.note.textContent = [this.#figures(), reason].filter(Boolean).join(" · ");
  }

  // End the answer with an error.
  fail(message) {
    this.finish(this.text ? "ended early" : "");
    if (!this.text) this.tokens.remove();
    this.element.append(element("p", { class: "error", role: "alert" }, message));
  }

  #show({ content, reasoning, calls, trace }, at) {
    this.text += content;
    this.#call(calls);
    if (!trace) {
      this.tokens.append(content);
      if (reasoning) this.#fold("Reasoning").append(reasoning);
      return;
    }
    this.ids.push(...trace.tokens.map((token) => token.id));
    this.meter.add(trace, at);
    const span = element("span", { class: "step" });
    for (const token of trace.tokens) {
      const mark = MARKS.has(token.mark) ? token.mark : "target";
      if (token.text) span.append(element("mark", { class: mark }, token.text));
    }
    span.dataset.step = String(this.steps.length);
    this.steps.push({ ...trace, isFirst: !this.steps.length, at: this.meter.seconds, element: span });
    const name = reasoning ? "Reasoning" : calls.length ? "The call as generated" : "";
    (content || !name ? this.tokens : this.#fold(name)).append(span);
    this.note.textContent = this.#figures();
  }

  // A part that opens on demand, before the answer.
  #fold(name) {
    if (!this.folds.has(name)) {
      const inner = element("div", { class: "tokens" });
      this.tokens.before(element("details", { class: "fold" }, element("summary", {}, name), inner));
      this.folds.set(name, inner);
    }
    return this.folds.get(name);
  }

  // Pieces of tool calls, each with the number of its call.
  #call(pieces) {
    for (const { index = 0, function: { name = "", arguments: given = "" } = {} } of pieces) {
      if (!this.calls[index]) {
        this.calls[index] = { name: element("b"), given: element("span") };
        this.note.before(element("pre", { class: "call", tabindex: "0", role: "group", "aria-label": "Tool call" },
          element("code", {}, this.calls[index].name, "(", this.calls[index].given, ")")));
      }
      this.calls[index].name.append(name);
      this.calls[index].given.append(given);
    }
  }

  #figures() {
    const meter = this.meter;
    if (!meter.tokens) return "";
    const parts = [plural(meter.tokens, "token")];
    if (meter.drafted) parts.push(`${meter.accepted} drafted and accepted`);
    if (meter.rate !== null) parts.push(`${rounded(meter.rate)} tokens/s`);
    if (meter.steps && !meter.isPlain) parts.push(`${rounded(meter.perStep, 2)} tokens per pass`);
    if (meter.speedUp !== null && !meter.isPlain) parts.push(`${times(meter.speedUp)} plain`);
    return parts.join(" · ");
  }

  #point(target) {
    const step = target.closest?.(".step");
    if (step) this.#inspect(Number(step.dataset.step));
  }

  #move(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const last = this.steps.length - 1;
    let next = event.key in moves ? this.current + moves[event.key] : null;
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = last;
    if (next === null || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.#inspect(Math.min(Math.max(next, 0), last), true);
  }

  #inspect(number, aloud = false) {
    hideTree();
    const step = this.steps[number], panel = byId("tree"), fold = step.element.closest("details");
    if (fold) fold.open = true;
    this.current = number;
    shown = step.element;
    shown.classList.add("now");
    const line = `Step ${number} of ${this.steps.length - 1}. ${describe(step)}`;
    panel.replaceChildren(element("p", {}, line));
    if (step.tree) panel.append(element("div", { class: "scroll tree" }, drawTree(step, line)));
    panel.hidden = false;
    if (aloud) shown.scrollIntoView({ block: "nearest" });
    const scroll = panel.lastElementChild;
    if (scroll.scrollWidth > scroll.clientWidth) scroll.tabIndex = 0;
    place(panel, shown);
    if (aloud) announce(`${step.element.textContent}. ${line}`);
  }
}

let shown = null;

export function hideTree() {
  byId("tree").hidden = true;
  shown?.classList.remove("now");
  shown = null;
}

// Hide the tree at a touch anywhere else, and move it with its step when the page scrolls.
export function watchTree() {
  addEventListener("pointerdown", (event) => {
    if (!event.target.closest?.("#tree, .tokens")) hideTree();
  });
  addEventListener("scroll", () => {
    if (!shown) return;
    const { top, bottom } = shown.getBoundingClientRect();
    if (bottom < 0 || top > innerHeight) hideTree();
    else place(byId("tree"), shown);
  }, { passive: true });
}

// Put a panel below its step, or above where there is more room; a tall tree is scaled to the room.
function place(panel, step) {
  const around = step.getBoundingClientRect(), first = step.getClientRects()[0] ?? around;
  const below = innerHeight - around.bottom - 12, above = around.top - 12, room = Math.max(below, above);
  panel.style.left = panel.style.top = "0";
  panel.style.setProperty("--room", `${room - FRAME}px`);
  const own = panel.getBoundingClientRect();
  const left = Math.max(8, Math.min(first.left, innerWidth - own.width - 8));
  const top = own.height <= below ? around.bottom + 6 : Math.max(4, around.top - own.height - 6);
  panel.style.left = `${left}px`;
  panel.style.top = `${top}px`;
}
