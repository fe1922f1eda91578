// Speed of one answer, measured here from the arrival of its chunks.

export class Meter {
  constructor(method) {
    this.method = method;
    this.points = [];
    this.tokens = this.steps = this.drafted = this.accepted = 0;
    this.plain = null; // tokens/s of plain decoding to compare with
  }

  // A chunk's trace, at a time in milliseconds.
  add(trace, now) {
    if (!trace.tokens?.length) return;
    this.began ??= now;
    this.tokens += trace.tokens.length;
    this.accepted += trace.tokens.filter((token) => token.mark !== "target").length;
    if (this.points.length) this.steps += 1;
    this.first ??= trace.tokens.length;
    this.drafted += trace.tree ? trace.tree.tokens.length - 1 : 0;
    this.points.push([(now - this.began) / 1000, this.tokens]);
  }

  get seconds() {
    return this.points.length ? this.points.at(-1)[0] : 0;
  }

  // Tokens after the first chunk, per second since then; null before there are any.
  get rate() {
    return this.seconds > 0 ? (this.tokens - this.first) / this.seconds : null;
  }

  get perStep() {
    return this.steps ? (this.tokens - this.first) / this.steps : null;
  }

  // Over plain decoding; null where nothing was drafted, and the two differ by what else the machine did.
  get speedUp() {
    return this.rate && this.plain && this.drafted ? this.rate / this.plain : null;
  }
}

export function rounded(value, digits = 0) {
  return value === null ? "–" : value.toFixed(value < 10 ? Math.max(digits, 1) : digits);
}

export function times(value) {
  return value === null ? "–" : `${value.toFixed(2)}×`;
}
