/** What the model says that a picture shows. */

import type { App } from "./app";
import { figure } from "./axes";
import { el } from "./dom";

export function prediction(app: App): HTMLElement | null {
  const shown = app.run.header.prediction;
  if (!shown) return null;
  const best = shown.labels[0]!;
  const verdict = shown.label === "" ? "" : shown.label === best.name ? ", which is its label" : "; its label is ";
  const rows = shown.labels.map(({ name, probability }) => el("tr", { "data-label": name, "data-probability": probability },
    el("th", { scope: "row" }, el("bdi", {}, name)), el("td", { class: "number" }, `${figure(100 * probability)} %`),
    el("td", {}, el("meter", { min: 0, max: 1, value: probability, "aria-hidden": "true" }))));
  return el("div", { class: "prediction" },
    el("p", {}, "Prediction: ", el("b", {}, el("bdi", {}, best.name)), verdict, verdict.startsWith(";") && el("b", {}, el("bdi", {}, shown.label)), "."),
    el("table", { class: "said" }, el("caption", { class: "hidden" }, "Labels by their probability"), el("tbody", {}, ...rows)));
}
