// Live chart of tokens over time, and the table of all answers.

import { byId, drawn, element } from "./dom.js";
import { rounded, times } from "./meter.js";

const WIDTH = 320, HEIGHT = 190, LEFT = 34, RIGHT = 8, TOP = 22, BOTTOM = 34, MOST_ROWS = 50;
const rows = [];

function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value);
}

function tick(value) {
  return String(Number(value.toPrecision(3)));
}

function summary(meter) {
  const against = meter.speedUp === null ? "" : `, ${times(meter.speedUp)} the speed of plain decoding`;
  return `${meter.method}: ${meter.tokens} tokens, ${rounded(meter.rate)} tokens per second${against}`;
}

// Draw meters over each other, oldest first; plain decoding's known speed as a dashed line where none of them is plain.
export function drawChart(meters) {
  const shown = meters.filter((meter) => meter.points.length);
  const seconds = ceiling(Math.max(0.1, ...shown.map((meter) => meter.seconds)));
  const tokens = ceiling(Math.max(10, ...shown.map((meter) => meter.tokens)));
  const x = (value) => LEFT + (value / seconds) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / tokens) * (HEIGHT - TOP - BOTTOM);
  byId("chart").hidden = !shown.length;
  const title = shown.map(summary).join("; ");
  const name = `Tokens over time. ${title}.`;
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name });
  for (const share of [0, 0.5, 1]) {
    const high = y(tokens * share), wide = x(seconds * share);
    svg.append(
      drawn("path", { class: "grid", d: `M${LEFT} ${high}H${WIDTH - RIGHT}` }),
      drawn("text", { x: LEFT - 5, y: high + 4, class: "end" }, tick(tokens * share)),
      drawn("text", { x: wide, y: HEIGHT - BOTTOM + 15, class: share === 1 ? "end" : "middle" }, tick(seconds * share)),
    );
  }
  svg.append(
    drawn("text", { x: 2, y: 11 }, "tokens"),
    drawn("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, class: "middle" }, "seconds since the first token"),
  );
  const reference = shown.some((meter) => meter.isPlain) ? null : shown.at(-1)?.plain;
  if (reference) {
    const end = Math.min(seconds, tokens / reference);
    svg.append(drawn("path", { class: "line plain known", d: `M${x(0)} ${y(0)}L${x(end)} ${y(end * reference)}` }));
  }
  for (const meter of shown) {
    const line = meter.points.map(([at, count]) => `${x(at).toFixed(1)} ${y(count).toFixed(1)}`).join("L");
    const kind = meter.isPlain ? "plain" : "fast";
    svg.append(drawn("path", { class: `line ${kind}`, d: `M${line}` }));
    const [at, count] = meter.points.at(-1);
    svg.append(drawn("circle", { class: kind, cx: x(at), cy: y(count), r: 3.5 }));
  }
  const figures = shown.map((meter) => element("p", { class: `figure ${meter.isPlain ? "plain" : "fast"}` },
    element("b", {}, meter.method), ` ${rounded(meter.rate)} tokens/s`,
    meter.isPlain || meter.speedUp === null ? null : element("strong", {}, times(meter.speedUp))));
  byId("chart").replaceChildren(svg, ...figures);
  byId("latest").textContent = shown.length ? summary(shown.at(-1)) : "";
}

// Append a finished answer to the table.
export function addRow(meter) {
  if (meter.rate === null) return;
  rows.unshift(meter);
  rows.length = Math.min(rows.length, MOST_ROWS);
  const head = ["method", "tokens/s", "per pass", "speed-up"].map((name) => element("th", { scope: "col" }, name));
  const body = rows.map((row) => element("tr", {}, element("th", { scope: "row" }, row.method),
    ...[rounded(row.rate), rounded(row.perStep, 2), times(row.isPlain ? 1 : row.speedUp)]
      .map((text) => element("td", {}, text))));
  const table = element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
  byId("table").replaceChildren(table);
  byId("table").hidden = false;
}

export function clearTable() {
  rows.length = 0;
  byId("table").hidden = true;
}
