/** The bar above every view: run, kind of attention, layer, head and query. */

import type { App } from "./app";
import { el } from "./dom";
import { layers, parts } from "./model";
import { bdi } from "./tokens";

export function controls(app: App): { root: HTMLElement; update(): void } {
  const root = el("form", { class: "controls", "aria-label": "What is shown", submit: (event) => event.preventDefault() });
  return { root, update: () => refresh(app, root) };
}

function refresh(app: App, root: HTMLElement): void {
  const focused = (document.activeElement as HTMLElement | null)?.id;
  const { run, part, layer, head, query } = app.state;
  const sites = layers(app.run, part);
  const fields: (HTMLElement | null)[] = [
    app.runs.length > 1 ? choice("run", "Run", app.runs.map((each, i) => [i, each.header.name]), run, (v) => app.set({ run: Number(v) })) : null,
    parts(app.run).length > 1
      ? choice("part", "Attention", parts(app.run).map((name) => [name, name.replace("-", ", ")]), part, (v) => app.set({ part: String(v), key: -1 }))
      : null,
    choice("layer", "Layer", sites.map((site) => [site.header.layer, `${site.header.layer + 1}${site.weights ? "" : " (thumbnail)"}`]), layer,
      (v) => app.set({ layer: Number(v) })),
    choice("head", "Head", Array.from({ length: app.site.header.heads }, (_, i) => [i, String(i + 1)]), head, (v) => app.set({ head: Number(v) })),
  ];
  const number = el("input", { id: "query", type: "number", min: 0, max: app.site.queryCount - 1, value: query,
    change: (event) => app.set({ query: Number((event.target as HTMLInputElement).value) }) });
  const position = el("label", { class: "field" }, "Query ", number, " ", bdi(app.site.queryToken(query), 24));
  const { mechanism, pattern } = app.site.header;
  const about = el("span", { class: "mechanism" }, mechanism, pattern === null ? "" : ` · ${pattern}`);
  root.replaceChildren(...fields.filter((field) => field !== null), position, about);
  if (focused && root.querySelector(`#${CSS.escape(focused)}`)) (root.querySelector(`#${CSS.escape(focused)}`) as HTMLElement).focus();
}

type Option = [number | string, string];

/** A labelled list; counted options are stepped through with the arrow keys, as browsers do. */
export function choice(id: string, name: string, options: Option[], value: number | string, pick: (value: string) => void): HTMLElement {
  const select = el("select", { id, change: (event) => pick((event.target as HTMLSelectElement).value) },
    ...options.map(([each, text]) => el("option", { value: each, selected: each === value }, text.slice(0, 60))));
  return el("label", { class: "field" }, `${name} `, select);
}
