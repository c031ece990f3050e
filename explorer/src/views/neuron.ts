/** How one weight comes about: q, k, their products, the score, the softmax. */

import type { App, View } from "../app";
import { figure, round, ticks } from "../axes";
import { el, svg } from "../dom";
import type { Terms } from "../weights";
import { topKeys } from "../table";
import { bdi } from "../tokens";

export const neuron: View = {
  id: "neuron",
  title: "Neuron",
  about: "One weight, computed here from the query's and the key's vectors as they enter the product (rotary positions are in them). Point at a key in the table, or choose it.",
  fits: (app) => app.runs.some((run) => run.sites.some((site) => site.pairs !== null)),
  build(app, root) {
    const body = el("div", { class: "neuron" });
    const side = el("div", { class: "side" });
    root.append(el("div", { class: "split" }, body, side));
    const chosen = () => (app.state.key >= 0 ? app.state.key : (app.site.top(app.state.head, app.state.query, 1)[0]?.key ?? 0));
    const show = (key: number) => body.replaceChildren(...pair(app, key));
    const draw = () => {
      const { head, query } = app.state;
      const table = topKeys({ site: app.site, head, query, key: chosen(), pick: (key) => app.set({ key }) }, 20);
      for (const row of table.querySelectorAll<HTMLElement>("tr[data-key]")) {
        row.addEventListener("pointerenter", () => show(Number(row.dataset.key)));
        row.addEventListener("focusin", () => show(Number(row.dataset.key)));
        row.addEventListener("pointerleave", () => show(chosen()));
      }
      const focused = (document.activeElement?.closest("tr[data-key]") as HTMLElement | null)?.dataset.key;
      side.replaceChildren(table);
      if (focused) side.querySelector<HTMLElement>(`tr[data-key="${focused}"] button`)?.focus();
      show(chosen());
    };
    draw();
    return draw;
  },
};

function pair(app: App, key: number): HTMLElement[] {
  const { site } = app;
  const { head, query } = app.state;
  if (!site.pairs) return [el("p", { class: "note" }, site.weights ? "This mechanism is no softmax over pairs: it has no score of a query and a key." : "Of this layer the page holds thumbnails alone.")];
  const terms = site.pairs.terms(head, query, key);
  const title = el("h3", {}, `query ${query} `, bdi(site.queryToken(query)), ` · ${site.keyName(key)} `, bdi(site.keyToken(key)));
  const most = Math.max(...terms.q.map(Math.abs), ...terms.k.map(Math.abs));
  return [
    title,
    bars("q", "q", terms.q, most, false),
    bars("k", "k", terms.k, most, false),
    bars("q × k", "product", terms.products, Math.max(...terms.products.map(Math.abs)), true),
    sums(terms, site.isAllowed(head, query, key)),
  ];
}

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [640, 104, 64, 20];

/** A bar for each dimension. */
function bars(name: string, id: string, values: Float32Array, most: number, last: boolean): HTMLElement {
  const limit = most || 1;
  const high = HEIGHT - BOTTOM;
  const y = (value: number) => 4 + (high - 8) * (0.5 - value / (2 * limit));
  const x = (d: number) => LEFT + ((WIDTH - LEFT - 6) * d) / values.length;
  const wide = (WIDTH - LEFT - 6) / values.length;
  const marks = ticks(-limit, limit, 4).map((value) => svg("g", {},
    svg("line", { class: value === 0 ? "axis" : "rule", x1: LEFT, x2: WIDTH - 6, y1: y(value), y2: y(value) }),
    svg("text", { class: "y", x: LEFT - 6, y: y(value) + 4 }, round(value))));
  const dims = ticks(0, values.length - 1, 8).filter(Number.isInteger).map((d) => svg("text", { class: "x", x: x(d) + wide / 2, y: HEIGHT - 4 }, String(d)));
  const each = [...values].map((value, d) => svg("rect", {
    class: value < 0 ? "negative" : "positive", x: x(d) + Math.min(0.5, wide / 8), width: Math.max(wide - Math.min(1, wide / 4), 0.4),
    y: Math.min(y(0), y(value)), height: Math.abs(y(value) - y(0)),
  }, svg("title", {}, `dimension ${d}: ${figure(value, 4)}`)));
  const picture = svg("svg", { class: "chart", "data-save": name, viewBox: `0 0 ${WIDTH} ${HEIGHT + (last ? 16 : 0)}`, role: "img", "data-id": id, "aria-label": `${name}: ${values.length} numbers between ${figure(Math.min(...values))} and ${figure(Math.max(...values))}` },
    ...marks, ...each, ...dims, svg("text", { class: "name", x: 4, y: 4 + high / 2 + 2 }, name),
    last && svg("text", { class: "x", x: (LEFT + WIDTH) / 2, y: HEIGHT + 12 }, "dimension"));
  return el("div", {}, picture as unknown as Node);
}

/** The sum, line by line; each number is also there unrounded. */
function sums(terms: Terms, allowed: boolean): HTMLElement {
  const scaled = terms.dot * terms.scale;
  const lines: [string, string, number, string][] = [
    ["dot", "q · k, the sum of the products", terms.dot, ""],
    ["scaled", `× scale ${figure(terms.scale, 4)}`, scaled, ""],
    ...terms.positions.map(([name, value], i): [string, string, number, string] => [`position-${i + 1}`, `+ ${name}`, value, ""]),
    ["score", "= score", terms.score, "total"],
    ["lse", "− log Σ exp(scores of all keys that the query sees)", terms.lse, ""],
    ["weight", allowed ? "softmax: weight = exp(score − log Σ exp)" : "not computed: the pattern hides this key", allowed ? terms.weight : 0, "total"],
  ];
  const rows = lines.map(([id, name, value, kind]) => el("tr", { class: kind, "data-term": id, "data-value": value },
    el("th", { scope: "row" }, name), el("td", { class: "number" }, figure(value, 4))));
  return el("table", { class: "sums" }, el("caption", { class: "hidden" }, "How the weight comes about"), el("tbody", {}, ...rows));
}
