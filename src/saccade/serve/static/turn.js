// A question with its answer, or with two side by side; all of it is in `data`, from which it can be shown again.

import { Answer } from "./answer.js";
import { element } from "./dom.js";
import { previews } from "./media.js";
import { Replay, verdict } from "./replay.js";
import { isPlain, methodName, methodOptions, modelOf } from "./settings.js";

export function newRecord(speculation, model, plain = null) {
  return { speculation, method: methodName(speculation, modelOf(model)), plain, events: [], end: null, error: "" };
}

export class Turn {
  // `data`: number, text, files, request, and a record per answer; `change(turn, place, speculation)` answers again
  constructor(data, change) {
    this.data = data;
    this.change = change;
    this.isRace = data.records.length > 1;
    const name = `Question ${data.number + 1}`;
    this.lanes = element("div", { class: this.isRace ? "lanes two" : "lanes" });
    this.head = element("div", { class: "head" }); // of two answers: verdict and replay, whose trees are the tail
    this.tail = element("div", {});
    this.element = element("section", { class: "turn", "aria-label": name }, element("h2", { class: "unseen" }, name),
      element("div", { class: "question" }, previews(data.files), element("p", {}, data.text)), this.head, this.lanes,
      this.tail);
  }

  // Show all records again; those at these places are about to be answered.
  fill(awaited = []) {
    const { records, request } = this.data;
    this.head.replaceChildren();
    this.tail.replaceChildren();
    this.replay = null;
    this.answers = records.map((record) => new Answer(record, isPlain(record.speculation)));
    this.lanes.replaceChildren(...this.answers.map((answer) => answer.element));
    const model = modelOf(request.model);
    for (const [place, answer] of this.answers.entries()) {
      const { end, error, speculation } = records[place];
      if (this.isRace && model) answer.title.replaceWith(this.#choice(place, methodOptions(model), speculation));
      if (awaited.includes(place)) {
        if (place) answer.note.textContent = "waits for the other one: each has the machine for itself";
      } else if (error) answer.fail(error);
      else answer.finish(end ?? "cut off when the page was left");
    }
  }

  // Compare two answers that are whole, and return the verdict; "" where there is none.
  compare() {
    const isWhole = this.data.records.every(({ end, error }) => end === "" && !error);
    if (!this.isRace || !isWhole) return "";
    const text = verdict(this.answers, this.data.request.temperature);
    this.head.append(element("p", { class: "verdict" }, text));
    if (this.answers.some((answer) => answer.steps.length < 2)) return text; // too short to go through
    this.replay = new Replay(this.answers);
    this.head.append(this.replay.controls);
    this.tail.append(...this.replay.courses.map((course) => course.element));
    return text;
  }

  // Text of the last answer that has one.
  get text() {
    return this.answers.findLast((answer) => answer.text)?.text ?? "";
  }

  get isAnswered() {
    return this.answers.some((answer) => answer.text || answer.calls.length || answer.folds.size);
  }

  remove() {
    for (const medium of this.element.querySelectorAll("img, video")) URL.revokeObjectURL(medium.src);
    this.element.remove();
  }

  #choice(place, options, speculation) {
    const select = element("select", { "aria-label": place ? "Method on the right" : "Method on the left" }, options);
    select.value = speculation;
    select.addEventListener("change", () => this.change(this, place, select.value));
    return select;
  }
}
