// Model, method, answer length, temperature and key; what is wrong with one is said at its field.

import { fetchModels } from "./api.js";
import { byId, element } from "./dom.js";
import { recall, remember } from "./store.js";

const KEY = "saccade-key", NUMBERS = ["length", "temperature"], ON_SHEET = [...NUMBERS, "key"];
const PLAIN = ["off", "plain"];
let models = [];

export const key = () => byId("key").value.trim();
export const isPlain = (speculation) => PLAIN.includes(speculation);
export const modelOf = (id) => models.find((model) => model.id === id);
export const currentModel = () => modelOf(byId("model").value) ?? models[0];

export function showSettings(isOpen) {
  byId("sheet").hidden = !isOpen;
  byId("settings").setAttribute("aria-expanded", isOpen);
}

// Say at a field what is wrong with it, and go there; with no text, take that back.
export function fault(id, text, goes = true) {
  const field = byId(id);
  field.setAttribute("aria-invalid", Boolean(text));
  byId(`${id}-problem`).textContent = text;
  if (!text || !goes) return;
  if (ON_SHEET.includes(id)) showSettings(true);
  field.closest("[hidden]")?.removeAttribute("hidden");
  field.focus();
}

function wrong(id) {
  const field = byId(id), kind = field.step ? "number" : "whole number";
  return field.validity.valid ? "" : `Give a ${kind} from ${field.min} to ${field.max}.`;
}

// Whether all numbers can be used; the first that cannot gets the focus.
export function areRight() {
  const bad = NUMBERS.find(wrong);
  if (bad) fault(bad, wrong(bad));
  return !bad;
}

export function decoding() {
  const [max_tokens, temperature] = NUMBERS.map((id) => byId(id).valueAsNumber);
  return { model: currentModel().id, max_tokens, temperature };
}

function option(value, text) {
  return element("option", { value }, text);
}

export function methodName(speculation, model) {
  return isPlain(speculation) ? "plain" : speculation || (model?.saccade.method ?? "default");
}

// Options of a select with all methods of a model.
export function methodOptions({ saccade: about }) {
  const lossy = new Set(about.lossy ?? []), named = about.methods.filter((name) => !isPlain(name));
  const groups = [
    ["Profiles", about.profiles.filter((name) => name !== "off")],
    ["Lossless", named.filter((name) => !lossy.has(name))],
    ["Lossy: answers may differ", named.filter((name) => lossy.has(name))],
  ].filter(([, names]) => names.length);
  return [
    option("", `${about.method} (default)`), option("off", "off: plain decoding"),
    ...groups.map(([label, names]) => element("optgroup", { label }, names.map((name) => option(name, name)))),
  ];
}

function showModel() {
  const { saccade: about, max_model_len: context, id, parent } = currentModel();
  const adapted = parent && `An adapter of ${parent}, whose drafters it has: the further it leads from it, the fewer `
    + "drafts are accepted.";
  const caveats = [about.caveat, adapted].filter(Boolean).join(" ");
  byId("method").replaceChildren(...methodOptions(currentModel()));
  byId("method").disabled = false;
  byId("caveat").textContent = caveats;
  byId("caveat").hidden = !caveats;
  byId("fitting").hidden = id !== "pocket";
  byId("length").max = context ?? 100000;
  fault("model", "");
  showLegend();
}

function showLegend() {
  const { saccade: about } = currentModel(), name = byId("method").value;
  const isLossy = name ? (about.lossy ?? []).includes(name) : !about.lossless;
  for (const item of document.querySelectorAll(".of-lossy")) item.hidden = !isLossy;
  fault("method", "");
}

// Read the models again; a `ServerError` where the server refuses.
export async function loadModels() {
  models = await fetchModels(key());
  fault("key", "");
  const before = byId("model").value;
  byId("model").replaceChildren(...models.map((model) => option(model.id, model.id)));
  if (modelOf(before)) byId("model").value = before;
  byId("model-field").hidden = models.length < 2;
  showModel();
}

// `renewed` is called once there is another key.
export function watchSettings(renewed) {
  byId("key").value = recall(KEY);
  byId("key").addEventListener("change", () => {
    remember(KEY, key());
    renewed();
  });
  byId("model").addEventListener("change", showModel);
  byId("method").addEventListener("change", showLegend);
  byId("settings").addEventListener("click", () => showSettings(byId("sheet").hidden));
  for (const id of NUMBERS) byId(id).addEventListener("input", () => fault(id, wrong(id), false));
}
