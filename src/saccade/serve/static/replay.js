// Two recorded answers on a common clock, which starts at the first token of each; draft trees unfold as it goes.

import { announce, drawn, element } from "./dom.js";
import { times } from "./meter.js";
import { drawTree, stages, treeHeight, unfold } from "./tree.js";

const SLOWDOWNS = [[1, "Real time"], [4, "1/4 speed"], [10, "1/10 speed"], [50, "1/50 speed"]];
const PASS = 0.4; // seconds in which an eye can follow a pass
const DRAFTING = 0.5, CHECKING = 0.75; // shares of a step's time at which these end in the drawing
const TICKS = 500, LONGEST_FRAME = 0.1;
const ICONS = {
  back: "M4 3v10M13 3L6 8l7 5z", play: "M4 3l9 5-9 5z", pause: "M5 3v10M11 3v10", forward: "M12 3v10M3 3l7 5-7 5z",
};

const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// One answer of the two, and how far it is.
class Course {
  constructor(answer) {
    this.answer = answer;
    this.state = "";
    this.number = -1;
    this.tree = element("div", { class: "stage tree", tabindex: "0", role: "group", "aria-label": "Draft tree" });
    this.caption = element("p", { class: "caption" });
    this.count = element("span");
    this.bar = element("div", { class: "bar" });
    this.element = element("div", { class: "course", role: "group", "aria-label": `Course of ${answer.meter.method}` },
      element("p", { class: "count" }, element("b", {}, answer.meter.method), " ", this.count), this.bar, this.caption,
      this.tree);
    this.tree.style.setProperty("--high", `${Math.max(...answer.steps.map(treeHeight))}px`);
  }

  // Show how far the answer is after some seconds.
  show(time) {
    const { steps, meter } = this.answer, later = steps.findIndex((step) => step.at > time);
    const done = later < 0 ? steps.length : later; // steps
    const isAt = done === steps.length || steps[done - 1].at === time, number = isAt ? done - 1 : done;
    const step = steps[number], began = steps[number - 1]?.at ?? 0, share = (time - began) / (step.at - began);
    const last = stages(step) - 1;
    let stage = last;
    if (!isAt && share < DRAFTING) stage = Math.ceil((share / DRAFTING) * (last - 2));
    else if (!isAt && share < CHECKING) stage = last - 1;
    const state = `${done} ${number} ${stage}`;
    if (state === this.state) return;
    this.state = state;
    if (number !== this.number) {
      const before = steps[number - 1]?.tokens.at(-1).text ?? "";
      this.tree.replaceChildren(drawTree(step, "Draft tree of this step", before));
      this.number = number;
    }
    this.caption.textContent = unfold(this.tree.firstChild, step, stage);
    this.#follow(stage === last ? ".root, .accepted, .own" : "g:not(.future)", stage === last);
    steps.forEach((one, place) => one.element.classList.toggle("later", place >= done));
    const arrived = steps.slice(0, done).reduce((sum, one) => sum + one.tokens.length, 0);
    const end = done === steps.length ? `: done after ${steps.at(-1).at.toFixed(2)} s` : "";
    this.count.textContent = `${arrived} of ${meter.tokens} tokens in ${done} of ${steps.length} passes${end}`;
    this.bar.style.setProperty("--share", `${(100 * arrived) / meter.tokens}%`);
  }

  // Keep the nodes furthest to the right in sight, and with a verdict also those furthest down.
  #follow(chosen, isVerdict) {
    const { tree } = this, frame = tree.getBoundingClientRect();
    const nodes = [...tree.querySelectorAll(chosen)].map((node) => node.getBoundingClientRect());
    tree.scrollLeft += Math.max(...nodes.map((node) => node.right)) - frame.right;
    if (isVerdict) tree.scrollTop += Math.max(...nodes.map((node) => node.bottom)) - frame.bottom;
    else tree.scrollTop = 0;
  }
}

function button(icon, name, act) {
  const path = drawn("path", { d: ICONS[icon] });
  const image = drawn("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" }, path);
  const made = element("button", { type: "button", "aria-label": name, title: name }, image);
  made.addEventListener("click", act);
  return made;
}

export class Replay {
  constructor(answers) {
    this.courses = answers.map((answer) => new Course(answer));
    this.end = Math.max(...answers.map((answer) => answer.meter.seconds));
    const drafting = answers.filter((answer) => answer.meter.drafted), watched = drafting.length ? drafting : answers;
    const stepped = watched.flatMap((answer) => answer.steps.map((step) => step.at));
    this.moments = [...new Set([0, ...stepped, this.end])].sort((a, b) => a - b);
    const pass = Math.min(...watched.map(({ meter, steps }) => meter.seconds / steps.length));
    const fitting = SLOWDOWNS.find(([slowdown]) => pass * slowdown >= PASS);
    this.toggle = button("play", "Play", () => (this.frame ? this.pause() : this.play()));
    this.speed = element("select", { "aria-label": "Speed of the replay" },
      SLOWDOWNS.map(([slowdown, name]) => element("option", { value: slowdown }, name)));
    this.speed.value = (fitting ?? SLOWDOWNS.at(-1))[0];
    this.bar = element("input", { type: "range", min: 0, max: TICKS, "aria-label": "Time of the replay" });
    this.bar.addEventListener("input", () => {
      this.pause();
      this.show((this.bar.valueAsNumber / TICKS) * this.end);
    });
    this.clock = element("span", { class: "clock" });
    this.toggle.hidden = this.speed.hidden = isStill();
    this.controls = element("div", { class: "replay", role: "group", "aria-label": "Replay of both answers" },
      button("back", "One pass back", () => this.#step(this.moments.findLast((moment) => moment < this.time))),
      this.toggle,
      button("forward", "One pass forward", () => this.#step(this.moments.find((moment) => moment > this.time))),
      this.bar, this.clock, this.speed);
    this.show(this.end);
  }

  // Play from the beginning, unless the reader wants no motion.
  start() {
    if (isStill()) return;
    this.show(0);
    this.play();
  }

  play() {
    if (this.time >= this.end) this.show(0);
    let last = performance.now();
    const next = (now) => {
      const passed = Math.min(Math.max(now - last, 0) / 1000, LONGEST_FRAME); // a frame may have begun before
      last = now;
      this.show(Math.min(this.time + passed / Number(this.speed.value), this.end));
      if (this.time < this.end && this.bar.isConnected) this.frame = requestAnimationFrame(next);
      else this.pause();
    };
    this.frame = requestAnimationFrame(next);
    this.#label("pause", "Pause");
  }

  pause() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.#label("play", "Play");
  }

  show(time) {
    this.time = time;
    for (const course of this.courses) course.show(time);
    const text = `${time.toFixed(2)} of ${this.end.toFixed(2)} s`;
    this.clock.textContent = text;
    this.bar.value = (time / this.end) * TICKS;
    this.bar.setAttribute("aria-valuetext", text);
  }

  #label(icon, name) {
    this.toggle.ariaLabel = this.toggle.title = name;
    this.toggle.querySelector("path").setAttribute("d", ICONS[icon]);
  }

  #step(moment) {
    this.pause();
    if (moment !== undefined) this.show(moment);
    announce(this.courses.map(({ answer, caption }) => `${answer.meter.method}: ${caption.textContent}`).join(" "));
  }
}

// Whether two answers are the same, and how long each took.
export function verdict([left, right], temperature) {
  const { ids } = left, same = ids.length === right.ids.length && ids.every((id, place) => id === right.ids[place]);
  const took = [left, right].map(({ meter }) => `${meter.method} ${meter.seconds.toFixed(2)} s`).join(", ");
  const [slow, fast] = right.meter.isPlain ? [right.meter, left.meter] : [left.meter, right.meter];
  const isFaster = slow.isPlain && fast.drafted && slow.rate && fast.rate;
  const faster = isFaster ? `: ${fast.method} has ${times(fast.rate / slow.rate)} the speed of plain decoding` : "";
  const time = `From the first token to the last: ${took}${faster}.`;
  if (same) return `Both answers are the same, token for token. ${time}`;
  const place = right.ids.findIndex((id, number) => id !== ids[number]);
  const marks = [left, right].flatMap(({ steps }) => steps.flatMap(({ tokens }) => tokens.map(({ mark }) => mark)));
  const why = temperature > 0 ? " Sampled answers may." : marks.includes("loose") ? " A lossy method’s may." : "";
  return `The answers differ from token ${(place < 0 ? right.ids.length : place) + 1} on.${why} ${time}`;
}
