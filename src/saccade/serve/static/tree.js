// A step's draft tree, drawn from left to right: one column per depth, one row per leaf.

import { drawn, plural } from "./dom.js";

const ROW = 24, HIGH = 19, GAP = 16, PAD = 7, SIGN = 7.3, LONGEST = 18;

function label(text) {
  const seen = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").trim() || (text ? "␣" : "∅");
  return seen.length > LONGEST ? `${seen.slice(0, LONGEST - 1)}…` : seen;
}

export function describe(tree, marks) {
  if (!tree) return "no draft tree: the model’s own token";
  const drafted = tree.tokens.length - 1, accepted = tree.path.length - 1;
  const loose = marks.some((mark) => mark === "loose" || mark === "shifted") ? ", some by a lossy rule" : "";
  return `${plural(drafted, "token")} drafted, ${accepted} accepted${loose}`;
}

export function drawTree(tree, name) {
  const taken = new Set(tree.path);
  const nodes = tree.tokens.map((token, number) => {
    const kind = number === 0 ? "root" : taken.has(number) ? "accepted" : "rejected";
    return { text: label(token.text), kind, children: [], depth: 0, row: 0 };
  });
  const widths = [];
  nodes.forEach((node, number) => {
    if (number) {
      const parent = nodes[tree.parents[number]];
      node.depth = parent.depth + 1;
      parent.children.push(node);
    }
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.text.length * SIGN + 2 * PAD);
  });
  let rows = 0;
  (function place(node) {
    node.children.sort((a, b) => (b.kind === "accepted") - (a.kind === "accepted"));
    node.children.forEach(place);
    node.row = node.children.length ? node.children[0].row : rows++;
  })(nodes[0]);
  const lefts = [2];
  widths.forEach((width, depth) => { lefts[depth + 1] = lefts[depth] + width + GAP; });
  const width = lefts[widths.length] - GAP + 2, height = rows * ROW;
  const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  const middle = (node) => node.row * ROW + ROW / 2;
  for (const node of nodes) {
    for (const child of node.children) {
      const from = lefts[node.depth] + widths[node.depth], bend = from + GAP / 2;
      const d = `M${from} ${middle(node)}H${bend}V${middle(child)}H${lefts[child.depth]}`;
      svg.prepend(drawn("path", { d, class: `edge ${child.kind}` }));
    }
    const x = lefts[node.depth], wide = widths[node.depth];
    svg.append(drawn("g", { class: node.kind },
      drawn("rect", { x, y: middle(node) - HIGH / 2, width: wide, height: HIGH, rx: 5 }),
      drawn("text", { x: x + wide / 2, y: middle(node) + 4 }, node.text)));
  }
  return svg;
}
