// Pictures and videos of the next question: chosen, dropped, pasted or taken.

import { byId, element } from "./dom.js";

const chosen = [];

const PICTURES = /^image\/(png|jpeg|webp|gif|bmp|tiff)$/;
const FILMS = /^(.{4}(ftyp|moov|mdat|wide|free|skip|pnot)|\x1aE\xdf\xa3|RIFF.{4}AVI |OggS|\0\0\x01[\xb3\xba]|G)/s; // first bytes

const takes = (about, kind) => about?.media?.includes(kind) ?? true;
const encodedSize = (files) => files.reduce((sum, file) => sum + file.size * 4 / 3, 0); // bytes in a request

// What is wrong with a file, in a sentence; nothing where the server may read it. `about`: of the model
async function fault(file, about) {
  const name = file.name || "The file", megabytes = about?.max_body_mib ?? Infinity;
  if (encodedSize([...chosen, file]) > megabytes * 2 ** 20) {
    const most = Math.floor((megabytes * 2 ** 20 * 0.75) / 1e6), own = Math.ceil(file.size / 1e6);
    return `${name} has ${own} MB, and all files of a question may have ${most} MB; choose a smaller one.`;
  }
  if (!file.size) return `${name} is empty; choose another file.`;
  if (file.type.startsWith("video/")) {
    if (!takes(about, "video")) return `${name} is a video, which this model does not take; choose a picture of it.`;
    const begin = new Uint8Array(await file.slice(0, 12).arrayBuffer().catch(() => new ArrayBuffer(0)));
    return FILMS.test(String.fromCharCode(...begin)) ? "" : `${name} is no video that can be read; choose another file.`;
  }
  if (!file.type.startsWith("image/")) return `${name} is neither a picture nor a video; choose another file.`;
  if (!takes(about, "image")) return `${name} is a picture, and this model reads text only; choose another model.`;
  if (!PICTURES.test(file.type)) return `${name} is no PNG, JPEG, WebP, GIF, BMP or TIFF; save it as one of them.`;
  if (file.type === "image/tiff") return ""; // which most browsers cannot show
  try {
    (await createImageBitmap(file)).close();
    return "";
  } catch {
    return `${name} is damaged or no picture; choose another file.`;
  }
}

function preview(file) {
  const url = URL.createObjectURL(file);
  if (file.type.startsWith("video/")) {
    const film = element("video", { controls: true, preload: "metadata", "aria-label": file.name || "video" });
    film.src = url;
    return film;
  }
  const picture = element("img", { alt: file.name || "picture" });
  picture.src = url;
  return picture;
}

function draw() {
  const list = byId("media");
  list.hidden = !chosen.length;
  for (const medium of list.querySelectorAll("img, video")) URL.revokeObjectURL(medium.src);
  list.replaceChildren(...chosen.map((file) => {
    const name = file.name || "picture";
    const button = element("button", { type: "button", "aria-label": `Remove ${name}` }, "×");
    button.addEventListener("click", () => {
      removeMedia(file);
      byId("text").focus({ preventScroll: true });
    });
    return element("li", {}, preview(file), button);
  }));
}

// Add the files that a model and its server can read, and return a sentence about each of the others.
export async function addMedia(files, model) {
  const faults = [];
  for (const file of [...files]) { // the dialogue's own list is emptied meanwhile
    const sentence = await fault(file, model?.saccade);
    if (sentence) faults.push(sentence);
    else chosen.push(file);
  }
  draw();
  return faults;
}

export function removeMedia(file) {
  if (chosen.includes(file)) chosen.splice(chosen.indexOf(file), 1);
  draw();
}

// Files of the next question, which are then no longer chosen.
export function takeMedia() {
  const taken = chosen.splice(0);
  draw();
  return taken;
}

export function hasMedia() {
  return chosen.length > 0;
}

export function previews(files) {
  return files.map(preview);
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name || "A file"} cannot be read; choose it again.`));
    reader.readAsDataURL(file);
  });
}

// Content of a user's message: media first, then the text.
export async function content(files, text) {
  const parts = await Promise.all(files.map(async (file) => {
    const kind = file.type.startsWith("video/") ? "video_url" : "image_url";
    return { type: kind, [kind]: { url: await dataUri(file) } };
  }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// Listen for drops and pastes on the whole page, and for the two file dialogues.
export function watchMedia(add) {
  let depth = 0;
  const over = (change) => {
    depth = change === 0 ? 0 : depth + change;
    byId("drop").hidden = depth <= 0;
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => { if (hasFiles(event)) over(1); });
  addEventListener("dragleave", (event) => { if (hasFiles(event)) over(-1); });
  addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  addEventListener("drop", (event) => {
    over(0);
    if (!hasFiles(event)) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
  addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) {
      event.preventDefault();
      add(event.clipboardData.files);
    }
  });
  for (const [button, input] of [["choose", "files"], ["camera", "shot"]]) {
    byId(button).addEventListener("click", () => byId(input).click());
    byId(input).addEventListener("change", () => {
      add(byId(input).files);
      byId(input).value = "";
    });
  }
}
