"use strict";
// The token view: pickers for prompt and method, and per step the draft tree with its accepted path.
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const ROW = 30, HEIGHT = 22, GAP = 26, CHARACTER = 7.5, LONGEST = 18;

  function element(name, attributes, parent) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    parent.append(made);
    return made;
  }

  function label(text) {
    const shown = text.replace(/\n/g, "").trim() || "␣";
    const letters = Array.from(shown);
    return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : shown;
  }

  // Nodes with depth, row and kind. The accepted child comes first, so the accepted path is a straight line.
  function layout(step) {
    const nodes = step.nodes.map((text, index) => ({
      text: text, parent: step.parents[index], depth: 0, row: 0, children: [], kind: "rejected",
    }));
    step.path.forEach((node, place) => {
      nodes[node].kind = place ? step.kinds[place - 1] || "draft" : "root";
    });
    nodes.forEach((node, index) => {
      if (!index) return;
      node.depth = nodes[node.parent].depth + 1;
      nodes[node.parent].children.push(node);
    });
    if (step.bonus !== null) {
      const last = nodes[step.path[step.path.length - 1]];
      const bonus = {
        text: step.bonus, parent: 0, depth: last.depth + 1, row: 0, children: [],
        kind: step.kinds[step.kinds.length - 1], own: true,
      };
      last.children.push(bonus);
      nodes.push(bonus);
    }
    let row = 0;
    (function place(node) {
      node.row = row;
      node.children.sort((a, b) => (a.kind === "rejected") - (b.kind === "rejected"));
      node.children.forEach((child, index) => {
        if (index) row += 1;
        place(child);
      });
    })(nodes[0]);
    return { nodes: nodes, rows: row + 1 };
  }

  function draw(step, said) {
    const { nodes, rows } = layout(step);
    const widths = [];
    for (const node of nodes) {
      const width = Math.max(CHARACTER * Array.from(label(node.text)).length + 14, 26);
      widths[node.depth] = Math.max(widths[node.depth] || 0, width);
    }
    const lefts = [2];
    widths.forEach((width, depth) => (lefts[depth + 1] = lefts[depth] + width + GAP));
    const width = lefts[widths.length] - GAP + 2, height = rows * ROW;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 " + width + " " + height);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", said);
    const middle = (node) => node.row * ROW + ROW / 2;
    const pairs = nodes.flatMap((node) => node.children.map((child) => [node, child]));
    pairs.sort((a, b) => (b[1].kind === "rejected") - (a[1].kind === "rejected")); // the path on top of the rest
    for (const [node, child] of pairs) {
      const from = lefts[node.depth] + widths[node.depth], to = lefts[child.depth], bend = from + GAP / 2;
      const path = "M" + from + " " + middle(node) + "H" + bend + "V" + middle(child) + "H" + to;
      element("path", { d: path, class: "edge " + child.kind }, svg);
    }
    for (const node of nodes) {
      const group = element("g", { class: "node " + node.kind + (node.own ? " own" : "") }, svg);
      const x = lefts[node.depth], y = middle(node);
      element("rect", {
        x: x, y: y - HEIGHT / 2, width: widths[node.depth], height: HEIGHT, rx: node.own ? 0 : 6,
      }, group);
      const text = element("text", { x: x + widths[node.depth] / 2, y: y + 4 }, group);
      text.textContent = label(node.text);
      element("title", {}, group).textContent = JSON.stringify(node.text) + ", " + node.kind;
    }
    return svg;
  }

  function sentence(step) {
    const drafted = step.nodes.length - 1, taken = step.path.length - 1;
    return drafted + " drafted, " + taken + " accepted" + (step.bonus === null ? "" : ", then the target’s own");
  }

  function prepare(answer) {
    const data = answer.querySelector("script[type='application/json']");
    if (!data) return;
    const steps = JSON.parse(data.textContent);
    const panel = answer.querySelector(".steps"), range = panel.querySelector("input");
    const output = panel.querySelector("output"), tree = panel.querySelector(".tree");
    const tokens = Array.from(answer.querySelectorAll(".tokens .token"));
    function show(number) {
      number = Math.min(Math.max(number, 1), steps.length);
      range.value = number;
      const step = steps[number - 1], said = "Step " + number + " of " + steps.length + ": " + sentence(step);
      output.textContent = said;
      tree.replaceChildren(draw(step, said));
      for (const token of tokens) token.classList.toggle("now", Number(token.dataset.step) === number);
    }
    range.addEventListener("input", () => show(Number(range.value)));
    panel.querySelector(".back").addEventListener("click", () => show(Number(range.value) - 1));
    panel.querySelector(".on").addEventListener("click", () => show(Number(range.value) + 1));
    for (const token of tokens) {
      const step = Number(token.dataset.step);
      if (step) token.addEventListener("click", () => show(step));
    }
    answer.classList.add("stepped");
    panel.hidden = false;
    return show;
  }

  for (const viewer of document.querySelectorAll(".viewer")) {
    const prompt = viewer.querySelector(".pick-prompt"), method = viewer.querySelector(".pick-method");
    const shown = new Map();
    const pick = function () {
      for (const article of viewer.querySelectorAll(".prompt")) {
        article.hidden = article.dataset.prompt !== prompt.value;
        for (const answer of article.querySelectorAll(".answer")) {
          answer.hidden = article.hidden || answer.dataset.method !== method.value;
          if (!answer.hidden && !shown.has(answer)) {
            const show = prepare(answer);
            shown.set(answer, show);
            if (show) show(1);
          }
        }
      }
    };
    prompt.addEventListener("change", pick);
    method.addEventListener("change", pick);
    const form = viewer.querySelector(".pickers");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
    pick();
  }
})();
