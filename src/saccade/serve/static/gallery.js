// Pictures to try, each with its question.

import { byId, element } from "./dom.js";
import { removeMedia } from "./media.js";

const PICTURES = [
  ["chart", "Bar chart", "Read the values from the bar chart."],
  ["line", "Line chart", "What does the line show on every day?"],
  ["receipt", "Receipt", "What was bought and for how much?"],
  ["scene", "Shapes", "List every shape and say where it is."],
  ["words", "Receipt, in words", "Read the receipt. Use full sentences."],
  ["story", "Shapes, in words", "Describe the picture. Use full sentences."],
];

let last = {}; // file and question of the picture that was chosen last

// `add` gets the file that is chosen. It takes the place of the one before, and its question that of no other text.
export function showGallery(add) {
  byId("gallery").append(...PICTURES.map(([name, title, question]) => {
    const source = `gallery-${name}.png`;
    const button = element("button", { type: "button" },
      element("img", { src: source, alt: "", width: 96, height: 96 }),
      element("span", {}, element("b", {}, title), element("span", {}, question)));
    button.addEventListener("click", async () => {
      const response = await fetch(source);
      const file = new File([await response.blob()], title, { type: "image/png" }), text = byId("text");
      removeMedia(last.file);
      if (!text.value.trim() || text.value === last.question) text.value = question;
      last = { file, question };
      await add([file]);
      byId("send").focus({ preventScroll: true });
    });
    return element("li", {}, button);
  }));
}
