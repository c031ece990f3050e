/** Layers x heads of thumbnails. */

import type { App, View } from "../app";
import { el } from "../dom";
import { legend } from "../legend";
import { layers, parts, type Site } from "../model";
import { thumbnail } from "../thumbnail";

export const overview: View = {
  id: "overview",
  title: "Overview",
  about: "Every head of every layer: queries down, keys across, in each cell the greatest weight. Open one to look closer.",
  fits: () => true,
  build(app, root) {
    const body = el("div", {});
    root.append(legend("greatest weight", 1, false, false), body);
    const draw = () => body.replaceChildren(...parts(app.run).map((part) => section(app, part)), notes(app));
    draw();
    return (changed) => {
      if (changed.has("run")) draw();
      else choose(app, body);
    };
  },
};

function section(app: App, part: string): HTMLElement {
  const sites = layers(app.run, part);
  const heads = Math.max(...sites.map((site) => site.header.heads));
  const first = sites[0]!;
  const grid: HTMLElement = el("div", { class: "overview", "data-save": `${part.replace("-", " ")} attention`, role: "grid", "aria-label": `${part.replace("-", " ")} attention`, keydown: (event) => move(event as KeyboardEvent, grid) });
  grid.style.setProperty("--heads", String(heads));
  const names = Array.from({ length: heads }, (_, head) => el("span", { role: "columnheader", class: "column" }, `head ${head + 1}`));
  grid.append(el("div", { role: "row" }, el("span", {}), ...names));
  for (const site of sites) {
    const cells = Array.from({ length: site.header.heads }, (_, head) => cell(app, part, site, head));
    grid.append(el("div", { role: "row" }, el("span", { role: "rowheader" }, `layer ${site.header.layer + 1}`), ...cells));
  }
  const title = `${part.replace("-", ", ")}-attention · ${first.queryCount.toLocaleString("en")} queries × ${first.keyCount.toLocaleString("en")} keys`;
  const block = el("section", {}, el("h3", {}, title), el("div", { class: "wide" }, grid));
  choose(app, block);
  return block;
}

function cell(app: App, part: string, site: Site, head: number): HTMLElement {
  const layer = site.header.layer;
  const picture = thumbnail(site, head);
  picture.setAttribute("aria-hidden", "true");
  return el("span", { role: "gridcell" }, el("button", {
    type: "button", "data-part": part, "data-layer": layer, "data-head": head, tabindex: -1,
    "aria-label": `Layer ${layer + 1}, head ${head + 1}: open its matrix`,
    click: () => app.set({ part, layer, head, key: -1, view: "matrix" }),
  }, picture));
}

/** Which cell the tab key reaches: the chosen head. */
function choose(app: App, root: HTMLElement): void {
  const { part, layer, head } = app.state;
  for (const button of root.querySelectorAll<HTMLElement>("button[data-head]")) {
    const { part: own, layer: row, head: column } = button.dataset;
    const chosen = own === part && Number(row) === layer && Number(column) === head;
    const entrance = own === part ? chosen : button === button.closest(".overview")?.querySelector("button");
    button.tabIndex = entrance ? 0 : -1;
    button.classList.toggle("chosen", chosen);
  }
}

/** Arrow keys go from head to head and layer to layer. */
function move(event: KeyboardEvent, grid: HTMLElement): void {
  const rows = [...grid.querySelectorAll<HTMLElement>("[role=row]")].map((row) => [...row.querySelectorAll<HTMLElement>("button")]).filter((row) => row.length);
  const row = rows.findIndex((buttons) => buttons.includes(document.activeElement as HTMLElement));
  if (row < 0) return;
  const column = rows[row]!.indexOf(document.activeElement as HTMLElement);
  const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const next = by && rows[row + by[0]!]?.[column + by[1]!];
  if (!next) return;
  event.preventDefault();
  rows.flat().forEach((button) => (button.tabIndex = -1));
  next.tabIndex = 0;
  next.focus();
}

function notes(app: App): HTMLElement {
  const all = app.run.header.notes;
  return el("ul", { class: "notes" }, ...all.map((note) => el("li", {}, note)));
}
