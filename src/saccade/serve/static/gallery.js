// Pictures to try, each with its question.

import { byId, element } from "./dom.js";

const PICTURES = [
  ["chart", "Bar chart", "Read the values from the bar chart."],
  ["line", "Line chart", "What does the line show on every day?"],
  ["receipt", "Receipt", "What was bought and for how much?"],
  ["scene", "Shapes", "List every shape and say where it is."],
  ["words", "Receipt, in words", "Read the receipt. Use full sentences."],
  ["story", "Shapes, in words", "Describe the picture. Use full sentences."],
];

// `take` gets the file and the question of the picture that is chosen.
export function showGallery(take) {
  byId("gallery").append(...PICTURES.map(([name, title, question]) => {
    const source = `gallery-${name}.png`;
    const button = element("button", { type: "button" },
      element("img", { src: source, alt: "", width: 96, height: 96 }),
      element("span", {}, element("b", {}, title), element("span", {}, question)));
    button.addEventListener("click", async () => {
      const response = await fetch(source);
      take(new File([await response.blob()], title, { type: "image/png" }), question);
    });
    return element("li", {}, button);
  }));
}
