/** One head's matrix of weights. */

import type { App, View } from "../app";
import { figure } from "../axes";
import { choice } from "../controls";
import { el } from "../dom";
import { Grid } from "../grid";
import { headGrid } from "../headgrid";
import { lookups } from "../lookup";
import { legend, markLegend, markTable } from "../legend";
import { SCALES, type Site } from "../model";
import { pinnedTable } from "../table";
import { bdi } from "../tokens";

export const matrix: View = {
  id: "matrix",
  title: "Matrix",
  about: "The weights of one head: a row is a query, a column a key. Only what the pattern lets the model compute is drawn. Click or Enter pins a query.",
  fits: () => true,
  build(app, root) {
    const readout = el("output", { class: "readout" });
    const side = el("div", { class: "side" });
    const bar = el("div", { class: "tools" });
    const grid = new Grid("Matrix of weights: arrow keys move the query and the key, plus and minus zoom", {
      hover: (cell) => readout.replaceChildren(...(cell ? said(app.site, app.state.head, cell.row, cell.column) : [])),
      pick: (cell) => app.set({ query: cell.row, key: cell.column }),
    });
    grid.root.addEventListener("keydown", (event) => keys(app, grid, event));
    root.append(bar, el("div", { class: "split" }, el("div", { class: "stage" }, grid.root, readout), side));
    app.onLeave(() => grid.end());
    const mark = () => {
      grid.pinned = { row: app.state.query, column: app.state.key };
      const { query, key, head } = app.state;
      side.replaceChildren(pinnedTable(app), markTable(app.site, head, query, key) ?? "", ...lookups(app.site, head, query));
      readout.replaceChildren(...(key < 0 ? [] : said(app.site, head, query, key)));
    };
    const draw = () => {
      const top = app.state.scale > 0 ? app.state.scale : app.site.scale(app.state.head);
      tools(app, grid, bar, top);
      if (app.site.weights) grid.show(headGrid(app.site, app.state.head, top), app.state.zoom);
      grid.root.hidden = !app.site.weights;
      mark();
    };
    draw();
    if (app.site.weights) grid.reveal(app.state.query, firstKey(app), true);
    return (changed) => {
      if (["run", "part", "layer", "head", "scale"].some((name) => changed.has(name as "run"))) draw();
      else if (changed.has("zoom") && app.site.weights) {
        grid.setZoom(app.state.zoom);
        grid.reveal(app.state.query, firstKey(app), true);
      }
      mark();
      if (changed.has("query") || changed.has("key")) grid.reveal(app.state.query, app.state.key);
      grid.draw();
    };
  },
};

function firstKey(app: App): number {
  const { key, head, query } = app.state;
  if (key >= 0) return key;
  return app.site.top(head, query, 1)[0]?.key ?? 0;
}

/** A cell in words. */
export function said(site: Site, head: number, query: number, key: number): (Node | string)[] {
  const pair = [`query ${query} `, bdi(site.queryToken(query)), ` → ${site.keyName(key)} `, bdi(site.keyToken(key)), ": "];
  const weight = site.isAllowed(head, query, key) ? `weight ${figure(site.weight(head, query, key), 4)}` : "not computed";
  return [...pair, el("b", {}, weight)];
}

function tools(app: App, grid: Grid, bar: HTMLElement, top: number): void {
  const zoom = (to: number) => app.set({ zoom: to }, true);
  const button = (text: string, name: string, act: () => void) => el("button", { type: "button", "aria-label": name, title: name, click: act }, text);
  const focused = document.activeElement?.id;
  bar.replaceChildren(
    legend("weight", top, app.site.signed),
    choice("scale", "Colours up to", [[0, "automatic"], ...SCALES.map((s): [number, string] => [s, String(s)])], app.state.scale, (v) => app.set({ scale: Number(v) }, true)),
    el("span", { class: "buttons", role: "group", "aria-label": "Zoom" }, button("−", "Zoom out", () => zoom(grid.step(-1))),
      button("+", "Zoom in", () => zoom(grid.step(1))), button("fit", "Fit the view", () => zoom(0))),
    markLegend(app.site) ?? "",
  );
  if (focused === "scale") bar.querySelector<HTMLElement>("#scale")?.focus();
}

const MOVES: Record<string, [number, number]> = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-20, 0], PageDown: [20, 0],
};

function keys(app: App, grid: Grid, event: KeyboardEvent): void {
  const { query, key } = app.state;
  const by = MOVES[event.key];
  if (by) app.set({ query: query + by[0], key: by[1] === 0 ? key : Math.max(0, firstKey(app) + by[1]) }, true);
  else if (event.key === "Home") app.set({ query: 0 }, true);
  else if (event.key === "End") app.set({ query: app.site.queryCount - 1 }, true);
  else if (event.key === "+" || event.key === "=") app.set({ zoom: grid.step(1) }, true);
  else if (event.key === "-") app.set({ zoom: grid.step(-1) }, true);
  else if (event.key === "Enter") app.set({ key: firstKey(app) });
  else return;
  event.preventDefault();
}
