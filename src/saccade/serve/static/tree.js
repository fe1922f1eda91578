// A step's draft tree, drawn from left to right: one column per depth, one row per leaf; the model's own token last.

import { drawn, plural } from "./dom.js";

const ROW = 24, HIGH = 19, GAP = 16, PAD = 7, SIGN = 7.3, LONGEST = 18;
const WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];

function label(text) {
  const seen = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").trim() || (text ? "␣" : "∅");
  return seen.length > LONGEST ? `${seen.slice(0, LONGEST - 1)}…` : seen;
}

const drafted = (step) => (step.tree ? step.tree.tokens.length - 1 : 0);
const accepted = (step) => (step.tree ? step.tree.path.length - 1 : 0);

// What came of a step, in a sentence.
export function describe(step) {
  const count = step.tokens.length, tokens = `${WORDS[count] ?? count} token${count === 1 ? "" : "s"}`;
  const result = `${tokens} for one pass of the large model`;
  if (step.isFirst) return `The prompt is read: ${result}.`;
  if (!drafted(step)) return `Nothing drafted: ${result}.`;
  const loose = step.tokens.some(({ mark }) => mark === "loose" || mark === "shifted") ? ", some by a lossy rule" : "";
  return `Drafted ${drafted(step)}, accepted ${accepted(step)}${loose}: ${result}.`;
}

// Nodes of a step in order of their numbers: the last token before it, drafted ones, then those of the model itself.
function nodesOf(step, before) {
  const { tokens, parents, path } = step.tree ?? { tokens: [{ text: before }], parents: [-1], path: [0] };
  const taken = new Set(path);
  const nodes = tokens.map(({ text }, number) => {
    const kind = number === 0 ? "root" : taken.has(number) ? "accepted" : "rejected";
    return { text: label(text), kind, parent: parents[number] };
  });
  let last = path.at(-1);
  for (const { text } of step.tokens.slice(path.length - 1)) {
    last = nodes.push({ text: label(text), kind: "own", parent: last }) - 1;
  }
  return nodes;
}

// Places in pixels of all nodes: drafted ones as if nothing were known of the verdict, then the model's own.
function layout(nodes) {
  const widths = [], lefts = [2], taken = new Set();
  let rows = 0;
  for (const [number, node] of nodes.entries()) {
    node.children = [];
    node.depth = number ? nodes[node.parent].depth + 1 : 0;
    if (number) nodes[node.parent].children.push(node);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.text.length * SIGN + 2 * PAD);
  }
  (function place(node) {
    const drafts = node.children.filter(({ kind }) => kind !== "own");
    drafts.forEach(place);
    node.row = drafts.length ? drafts[0].row : rows++;
    taken.add(`${node.depth} ${node.row}`);
  })(nodes[0]);
  for (const node of nodes.filter(({ kind }) => kind === "own")) {
    node.row = nodes[node.parent].row;
    while (taken.has(`${node.depth} ${node.row}`)) node.row += 1;
    rows = Math.max(rows, node.row + 1);
  }
  widths.forEach((width, depth) => { lefts[depth + 1] = lefts[depth] + width + GAP; });
  return { widths, lefts, width: lefts[widths.length] - GAP + 2, height: rows * ROW };
}

export function treeHeight(step) {
  return layout(nodesOf(step, "")).height;
}

// The drawing; `before`: text of the last token before the step, for a step without a tree.
export function drawTree(step, name, before = "") {
  const nodes = nodesOf(step, before), { widths, lefts, width, height } = layout(nodes);
  const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  const middle = (node) => node.row * ROW + ROW / 2;
  for (const node of nodes) {
    const x = lefts[node.depth], wide = widths[node.depth], { kind, depth } = node;
    for (const child of node.children) {
      const d = `M${x + wide} ${middle(node)}h${GAP / 2}V${middle(child)}H${lefts[child.depth]}`;
      svg.prepend(drawn("path", { d, class: `edge ${child.kind}`, "data-depth": child.depth }));
    }
    svg.append(drawn("g", { class: kind, "data-depth": depth },
      drawn("rect", { x, y: middle(node) - HIGH / 2, width: wide, height: HIGH, rx: 5 }),
      drawn("text", { x: x + wide / 2, y: middle(node) + 4 }, node.text)));
  }
  return svg;
}

// Stages of a step as it unfolds: a level of the draft after the other, the pass that checks them all, its verdict.
export function stages(step) {
  const depths = [0];
  for (let number = 1; number <= drafted(step); number += 1) {
    depths.push(depths[step.tree.parents[number]] + 1);
  }
  return Math.max(...depths) + 3;
}

// Show a drawing at a stage, and say what happens then.
export function unfold(svg, step, stage) {
  const verdict = stages(step) - 1, isChecked = stage >= verdict;
  svg.classList.toggle("checking", stage === verdict - 1);
  svg.classList.toggle("open", !isChecked);
  for (const part of svg.children) {
    const isOwn = part.classList.contains("own");
    part.classList.toggle("future", isOwn ? !isChecked : Number(part.dataset.depth) > stage);
  }
  if (isChecked) return describe(step);
  if (!drafted(step)) return "The large model works out its next token.";
  const many = plural(drafted(step), "token");
  return stage < verdict - 1 ? `The drafter proposes ${many}.` : `One pass of the large model checks ${many} at once.`;
}
