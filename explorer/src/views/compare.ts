/** Two runs, layers or heads beside each other, and their difference. */

import { united } from "../allowed";
import type { App, View } from "../app";
import { figure } from "../axes";
import { choice } from "../controls";
import { el } from "../dom";
import { Grid, type GridContent } from "../grid";
import { headGrid } from "../headgrid";
import { legend } from "../legend";
import type { Site } from "../model";
import { palette } from "../palette";
import { bdi, short } from "../tokens";

export const compare: View = {
  id: "compare",
  title: "Compare",
  about: "A is what is chosen above, B what is chosen here; the third matrix is A − B. The three scroll together.",
  fits: () => true,
  build(app, root) {
    const bar = el("div", { class: "tools" });
    const readout = el("output", { class: "readout" });
    const body = el("div", { class: "triple" });
    const grids: Grid[] = [];
    let following = false;
    const names = ["A", "B", "A − B"].map((name, number) => {
      const grid: Grid = new Grid(`Matrix ${name}`, {
        hover: (cell) => readout.replaceChildren(...(cell ? both(app, cell.row, cell.column) : [])),
        pick: (cell) => app.set({ query: cell.row, key: cell.column }),
        scrolled: () => {
          if (following) return;
          following = true;
          for (const other of grids) if (other !== grid) other.root.scrollTo(grid.root.scrollLeft, grid.root.scrollTop);
          requestAnimationFrame(() => (following = false));
        },
      });
      grid.root.addEventListener("keydown", (event) => keys(app, event));
      grids.push(grid);
      const caption = el("figcaption", {});
      body.append(el("figure", { "data-side": number }, caption, grid.root));
      return caption;
    });
    root.append(bar, body, readout);
    app.onLeave(() => grids.forEach((grid) => grid.end()));
    const draw = () => {
      const { a, b } = sides(app);
      tools(app, bar, grids[0]!);
      const problem = trouble(a.site, b.site);
      names.forEach((caption, i) => caption.replaceChildren(["A", "B", "A − B"][i]!, i < 2 ? `: ${[a, b][i]!.name}` : ""));
      grids.forEach((grid) => (grid.root.hidden = problem !== ""));
      readout.replaceChildren(problem);
      if (problem) return;
      const top = Math.max(a.site.scale(a.head), b.site.scale(b.head));
      const contents = [headGrid(a.site, a.head, top), headGrid(b.site, b.head, top), difference(a, b, top)].map(
        (content) => ({ ...content, strips: [] })); // they would shift one matrix against another
      const smallest = app.state.zoom > 0 ? app.state.zoom : 0;
      grids.forEach((grid, i) => {
        grid.show(contents[i]!, smallest);
        grid.pinned = { row: app.state.query, column: app.state.key };
      });
      if (!smallest) grids.forEach((grid) => grid.setZoom(grids[2]!.zoom));
      if (app.state.key >= 0) readout.replaceChildren(...both(app, app.state.query, app.state.key));
    };
    draw();
    grids.forEach((grid) => grid.reveal(app.state.query, app.state.query, true));
    return (changed) => {
      if ([...changed].every((name) => name === "query" || name === "key")) {
        for (const grid of grids) {
          grid.pinned = { row: app.state.query, column: app.state.key };
          grid.reveal(app.state.query, app.state.key);
          grid.draw();
        }
        readout.replaceChildren(...both(app, app.state.query, Math.max(0, app.state.key)));
      } else draw();
    };
  },
};

interface Side {
  name: string;
  site: Site;
  head: number;
}

/** By default another run's same head, or the next head of the same. */
function sides(app: App): { a: Side; b: Side } {
  const { run, layer, head, layer2, head2 } = app.state;
  const run2 = app.runs.length > 1 && app.state.run2 === run && head2 < 0 ? 1 - run : app.state.run2;
  const site2 = app.siteOf(run2, layer2 < 0 ? layer : layer2);
  const count = site2.header.heads;
  const other = head2 < 0 ? (run2 === run && layer2 < 0 ? (head + 1) % count : Math.min(head, count - 1)) : Math.min(head2, count - 1);
  const side = (site: Site, own: number, number: number) =>
    ({ name: `${app.runs.length > 1 ? `${short(app.runs[number]!.header.name, 30)}, ` : ""}layer ${site.header.layer + 1}, head ${own + 1}`, site, head: own });
  return { a: side(app.site, head, run), b: side(site2, other, run2) };
}

function trouble(a: Site, b: Site): string {
  if (!a.weights || !b.weights) return "Of one of the two the page holds thumbnails alone.";
  return "";
}

/** A − B where either is computed; of the tokens that both have. */
function difference(a: Side, b: Side, top: number): GridContent {
  const content = headGrid(a.site, a.head, top);
  const rows = Math.min(a.site.queryCount, b.site.queryCount);
  const columns = Math.min(a.site.keyCount, b.site.keyCount);
  return {
    ...content,
    palette: palette(true),
    preview: null,
    source: {
      rows,
      columns,
      spans: (row) => clipped(united(a.site.allowed.spans(a.head, row), b.site.allowed.spans(b.head, row)), columns),
      fill: (row, from, to, out) => {
        for (let key = from; key < to; key++) out[key - from] = a.site.weight(a.head, row, key) - b.site.weight(b.head, row, key);
      },
    },
  };
}

function clipped(spans: number[], columns: number): number[] {
  return spans.map((end) => Math.min(end, columns));
}

function both(app: App, row: number, column: number): (Node | string)[] {
  const { a, b } = sides(app);
  const within = ({ site }: Side) => row < site.queryCount && column < site.keyCount;
  const weight = (side: Side) => (within(side) ? side.site.weight(side.head, row, column) : 0);
  const [x, y] = [weight(a), weight(b)];
  return [`query ${row} `, bdi(a.site.queryToken(row)), ` → ${a.site.keyName(column)} `, bdi(a.site.keyToken(column)), ": ",
    el("b", {}, `A ${figure(x, 4)}, B ${figure(y, 4)}, A − B ${figure(x - y, 4)}`)];
}

function tools(app: App, bar: HTMLElement, grid: Grid): void {
  const { b } = sides(app);
  const focused = document.activeElement?.id;
  const run2 = app.runs.findIndex((run) => run.sites.includes(b.site));
  const options = (count: number, first = 0): [number, string][] => Array.from({ length: count }, (_, i) => [i + first, String(i + first + 1)]);
  const pin = { run2, layer2: b.site.header.layer, head2: b.head };
  const top = Math.max(sides(app).a.site.scale(app.state.head), b.site.scale(b.head));
  const zoom = (direction: 1 | -1) => app.set({ zoom: grid.step(direction) }, true);
  const layerCount = app.runs[run2]!.sites.filter((site) => site.header.kind === b.site.header.kind && site.header.stack === b.site.header.stack).length;
  bar.replaceChildren(el("span", { class: "b" }, "B:"),
    app.runs.length > 1 ? choice("run2", "Run", app.runs.map((run, i) => [i, run.header.name]), run2, (v) => app.set({ ...pin, run2: Number(v) })) : "",
    choice("layer2", "Layer", options(layerCount), b.site.header.layer, (v) => app.set({ ...pin, layer2: Number(v) })),
    choice("head2", "Head", options(b.site.header.heads), b.head, (v) => app.set({ ...pin, head2: Number(v) })),
    el("span", { class: "buttons", role: "group", "aria-label": "Zoom" }, el("button", { type: "button", "aria-label": "Zoom out", click: () => zoom(-1) }, "−"),
      el("button", { type: "button", "aria-label": "Zoom in", click: () => zoom(1) }, "+"), el("button", { type: "button", "aria-label": "Fit the view", click: () => app.set({ zoom: 0 }, true) }, "fit")),
    legend("weight", top, false), legend("A − B", top, true, false));
  if (focused && ["run2", "layer2", "head2"].includes(focused)) bar.querySelector<HTMLElement>(`#${focused}`)?.focus();
}

function keys(app: App, event: KeyboardEvent): void {
  const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!by) return;
  const { query, key } = app.state;
  app.set({ query: query + by[0]!, key: Math.max(0, (key < 0 ? query : key) + by[1]!) }, true);
  event.preventDefault();
}
