/** What the colours of a picture stand for. */

import { round } from "./axes";
import { el } from "./dom";
import type { Site } from "./model";
import { css, label, palette } from "./palette";

/** A bar of colours with ticks, as wide as a word or two. */
export function legend(name: string, top: number, signed = false, empty = true): HTMLElement {
  const colors = palette(signed);
  const canvas = el("canvas", { width: 160, height: 12, "aria-hidden": "true" });
  const ctx = canvas.getContext("2d")!;
  for (let x = 0; x < 160; x++) {
    const share = signed ? x / 79.5 - 1 : x / 159;
    ctx.fillStyle = css(colors, Math.sign(share) * share * share * top, top);
    ctx.fillRect(x, 0, 1, 12);
  }
  const marks = signed ? [-top, 0, top] : [0, top / 4, top];
  const numbers = el("span", { class: "ticks" }, ...marks.map((value, i) =>
    el("span", {}, `${i === marks.length - 1 && top < 1 ? "≥ " : ""}${round(value)}`)));
  return el("div", { class: "legend" }, el("span", { class: "name" }, name), el("span", { class: "ramp" }, canvas, numbers),
    empty && el("span", { class: "key" }, el("i", { class: "hatched" }), "not computed"));
}

/** The labels of tokens that stand beside a matrix. */
export function markLegend(site: Site): HTMLElement | null {
  if (site.marks.length === 0) return null;
  const list = el("div", { class: "legend marks" });
  for (const mark of site.marks) {
    const values = [...new Set(mark.values.slice(0, mark.values.data.length))].filter((v) => v >= 0).sort((a, b) => a - b);
    const swatches = values.slice(0, 10).map((value) => {
      const swatch = el("canvas", { width: 12, height: 12, "aria-hidden": "true" });
      const ctx = swatch.getContext("2d")!;
      ctx.fillStyle = label(value);
      ctx.fillRect(0, 0, 12, 12);
      return el("span", { class: "key" }, swatch, String(value));
    });
    list.append(el("span", { class: "name" }, mark.name), ...swatches, values.length > 10 ? ` and ${values.length - 10} more` : "");
  }
  return list;
}
