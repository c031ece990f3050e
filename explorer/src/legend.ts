/** What the colours of a picture stand for. */

import { round } from "./axes";
import { el } from "./dom";
import type { Mark, Site } from "./model";
import { css, palette } from "./palette";

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

/** What the strips beside a matrix stand for, the one next to it first. */
export function markLegend(site: Site): HTMLElement | null {
  if (site.marks.length === 0) return null;
  const list = el("dl", { class: "legend marks" });
  for (const mark of site.marks) list.append(el("dt", { class: "name" }, mark.name), el("dd", { "data-mark": mark.name }, ...colours(mark)));
  return list;
}

function colours(mark: Mark): (Node | string)[] {
  if (mark.top > 0) return [...legend("", mark.top, false, false).children].slice(1);
  const values = [...new Set(mark.values.slice(0, mark.values.data.length))].filter((value) => value >= 0).sort((a, b) => a - b);
  const keys = values.slice(0, 10).map((value) => {
    const swatch = el("canvas", { width: 12, height: 12, "aria-hidden": "true" });
    const ctx = swatch.getContext("2d")!;
    ctx.fillStyle = mark.color(value);
    ctx.fillRect(0, 0, 12, 12);
    return el("span", { class: "key" }, swatch, mark.said(value));
  });
  return [...keys, values.length > 10 ? ` and ${values.length - 10} more` : values.length ? "" : "none"];
}

/** What is said of the pinned query and key, in words and with their colours: for readers who see no strips. */
export function markTable(site: Site, head: number, query: number, key: number): HTMLElement | null {
  if (site.marks.length === 0) return null;
  const cell = (mark: Mark, value: number | null) => el("td", { "data-value": value }, value === null ? "–" : mark.said(value));
  const rows = site.marks.map((mark) => el("tr", { "data-mark": mark.name }, el("th", { scope: "row" }, mark.name),
    cell(mark, site.markOfQuery(mark, head, query)), cell(mark, key < 0 ? null : site.markOfKey(mark, head, key))));
  return el("table", { class: "said" }, el("caption", {}, "What the model says of them:"),
    el("thead", {}, el("tr", {}, ...["", `query ${query}`, key < 0 ? site.kindOfKeys : `${site.kindOfKeys} ${site.position(key)}`].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows));
}
