/** Two columns of tokens and lines between them, as wide and strong as weights. */

import type { App, View } from "../app";
import { el, svg } from "../dom";
import type { Link } from "../model";
import { label } from "../palette";
import { topKeys } from "../table";
import { short, visible } from "../tokens";
import { said } from "./matrix";

const [ROW, SHOWN, WIDTH, COLUMN] = [19, 60, 640, 190];
const LEAST = 0.01; // a weight that is drawn

export const lines: View = {
  id: "lines",
  title: "Lines",
  about: "From each query (left) to the keys that it reads (right). Point at a token to see its lines alone; click or Enter pins it. Heads are switched by their buttons.",
  fits: () => true,
  build(app, root) {
    const bar = el("div", { class: "buttons heads", role: "group", "aria-label": "Heads" });
    const stage = el("div", { class: "wide" });
    const side = el("div", { class: "side" });
    const readout = el("output", { class: "readout" });
    root.append(bar, el("div", { class: "split" }, el("div", {}, stage, readout), side));
    const draw = () => {
      const { head, query, key } = app.state;
      switches(app, bar);
      side.replaceChildren(topKeys({ site: app.site, head: shownHeads(app)[0] ?? head, query, key, pick: (chosen) => app.set({ key: chosen }) }));
      const focused = (document.activeElement as Element | null)?.getAttribute("data-query");
      stage.replaceChildren(picture(app) as unknown as Node);
      if (focused) stage.querySelector<SVGElement>("[data-query][tabindex='0']")?.focus();
      readout.replaceChildren(...(key < 0 ? [] : said(app.site, shownHeads(app)[0] ?? head, query, key)));
    };
    draw();
    return draw;
  },
};

/** The heads that are on: those of the state, or the chosen head alone. */
export function shownHeads(app: App): number[] {
  const count = app.site.header.heads;
  if (app.state.heads === "all") return Array.from({ length: count }, (_, head) => head);
  if (app.state.heads === "") return [app.state.head];
  return app.state.heads.split(",").map((text) => Number(text) - 1).filter((head) => Number.isInteger(head) && head >= 0 && head < count);
}

function switches(app: App, bar: HTMLElement): void {
  const shown = shownHeads(app);
  const focused = (document.activeElement as HTMLElement | null)?.dataset?.switch;
  const button = (text: string, pressed: boolean, heads: string, color: string | null) => {
    const each = el("button", { type: "button", "aria-pressed": String(pressed), "data-switch": text, click: () => app.set({ heads }) }, text);
    if (color) each.style.setProperty("--own", color);
    return each;
  };
  const buttons = Array.from({ length: app.site.header.heads }, (_, head) => {
    const next = shown.includes(head) ? shown.filter((other) => other !== head) : [...shown, head].sort((a, b) => a - b);
    return button(`head ${head + 1}`, shown.includes(head), next.map((other) => other + 1).join(",") || "none", label(head));
  });
  bar.replaceChildren(...buttons, button("all", shown.length === app.site.header.heads, "all", null));
  if (focused) bar.querySelector<HTMLElement>(`[data-switch="${focused}"]`)?.focus();
}

/** The stretch of `count` tokens around the middle one that is drawn: long texts are seen around what is pinned. */
function stretch(middle: number, count: number): [number, number] {
  const from = Math.max(0, Math.min(middle - Math.floor(SHOWN / 2), count - SHOWN));
  return [from, Math.min(count, from + SHOWN)];
}

/** The middle of the stretch of keys with the most weight. */
function fullest(row: Link[]): number {
  let [sum, most, best, first] = [0, -1, 0, 0];
  row.forEach(({ key, weight }, last) => {
    sum += Math.abs(weight);
    while (row[first]!.key <= key - SHOWN) sum -= Math.abs(row[first++]!.weight);
    if (sum > most) [most, best] = [sum, Math.round((row[first]!.key + row[last]!.key) / 2)];
  });
  return best;
}

function picture(app: App): SVGElement {
  const { site } = app;
  const { query, head, key } = app.state;
  if (!site.weights) return svg("svg", {});
  const heads = shownHeads(app);
  const [q0, q1] = stretch(query, site.queryCount);
  const [k0, k1] = stretch(key >= 0 ? key : fullest(site.row(heads[0] ?? head, query)), site.keyCount);
  const height = 30 + ROW * Math.max(q1 - q0, k1 - k0);
  const y = (row: number) => 34 + ROW * row;
  const paths = svg("g", { class: "links" });
  for (let i = q0; i < q1; i++) {
    for (const own of heads) {
      for (const { key: j, weight } of site.row(own, i)) {
        if (j < k0 || j >= k1 || Math.abs(weight) < LEAST) continue;
        const [x1, x2, y1, y2] = [COLUMN, WIDTH - COLUMN, y(i - q0), y(j - k0)];
        const line = svg("path", {
          d: `M${x1} ${y1}C${x1 + 90} ${y1} ${x2 - 90} ${y2} ${x2} ${y2}`, stroke: label(own),
          "stroke-width": 0.6 + 5 * Math.sqrt(Math.abs(weight)), "stroke-opacity": Math.min(1, 0.08 + 0.9 * Math.abs(weight)),
          "data-q": i, "data-k": j, "data-head": own, "data-weight": weight, "stroke-dasharray": weight < 0 ? "4 3" : null,
        });
        paths.append(line);
      }
    }
  }
  const root = svg("svg", { class: "lines", "data-save": "lines", viewBox: `0 0 ${WIDTH} ${height}`, role: "group", "aria-label": "Lines from queries to keys" },
    svg("text", { class: "title", x: COLUMN - 8, y: 14, "text-anchor": "end" }, "query"),
    svg("text", { class: "title", x: WIDTH - COLUMN + 8, y: 14 }, "key"), paths);
  for (let i = q0; i < q1; i++) root.append(token(app, root, "query", i, site.queryToken(i), i, COLUMN - 8, y(i - q0)));
  for (let j = k0; j < k1; j++) root.append(token(app, root, "key", j, site.keyToken(j), site.position(j), WIDTH - COLUMN + 8, y(j - k0)));
  return focus(root, "q", query);
}

/** A token of either column, with what pointing at it and choosing it does. */
function token(app: App, root: SVGElement, side: "query" | "key", index: number, text: string, position: number, x: number, y: number): SVGElement {
  const own = side === "query";
  const pinned = own ? index === app.state.query : index === app.state.key;
  const pin = () => app.set(own ? { query: index, key: -1 } : { key: index });
  const name = svg("tspan", { class: "token" }, `\u2068${short(text, 16)}\u2069`);
  const number = svg("tspan", { class: "position" }, own ? `${position}\u2002` : `\u2002${position}`);
  const label_ = svg("text", {
    class: `word ${pinned ? "pinned" : ""}`, x, y: y + 4, "text-anchor": own ? "end" : "start", role: "button", [`data-${side}`]: index,
    tabindex: pinned ? 0 : -1, "aria-label": `${side} ${position}: ${visible(text.slice(0, 60))}`, "aria-pressed": String(pinned), click: pin,
    pointerenter: () => focus(root, own ? "q" : "k", index), pointerleave: () => focus(root, "q", app.state.query),
    keydown: (event) => {
      const { key } = event as KeyboardEvent;
      const by = { ArrowUp: -1, ArrowDown: 1 }[key];
      if (by !== undefined) app.set(own ? { query: index + by, key: -1 } : { key: index + by }, true);
      else if (key === "Enter" || key === " ") pin();
      else return;
      event.preventDefault();
    },
  }, ...(own ? [number, name] : [name, number]));
  return label_;
}

/** Lines of a token stand out; the others fade. */
function focus(root: SVGElement, side: "q" | "k", index: number): SVGElement {
  for (const line of root.querySelectorAll(".links path")) {
    line.classList.toggle("faded", Number(line.getAttribute(`data-${side}`)) !== index);
  }
  return root;
}
