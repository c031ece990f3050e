/** How far a layer's heads look. */

import type { App, View } from "../app";
import { ticks } from "../axes";
import { el, svg } from "../dom";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [250, 150, 40, 34, 8];

export const distance: View = {
  id: "distance",
  title: "Distance",
  about: "The share of a head's whole attention by the distance between query and key, in tokens; bins double in width.",
  fits: (app) => app.runs.some((run) => run.sites.some((site) => site.distance !== null)),
  build(app, root) {
    const body = el("div", {});
    root.append(body);
    const draw = () => {
      const focused = (document.activeElement as HTMLElement | null)?.dataset.head;
      body.replaceChildren(small(app));
      if (focused) body.querySelector<HTMLElement>(`[data-head="${focused}"]`)?.focus();
    };
    draw();
    return draw;
  },
};

function small(app: App): HTMLElement {
  const { site } = app;
  if (!site.distance) return el("p", { class: "note" }, "Cross-attention has no distances: its queries and keys are of two texts.");
  const bins = site.distance.shape[1]!;
  const all = site.distance.slice(0, site.header.heads * bins);
  const most = Math.min(1, Math.max(...all, 0.05));
  const charts = Array.from({ length: site.header.heads }, (_, head) =>
    el("button", { type: "button", class: head === app.state.head ? "multiple chosen" : "multiple", "aria-pressed": String(head === app.state.head), "data-head": head, click: () => app.set({ head }) },
      el("span", { class: "name" }, `head ${head + 1}`), chart(head, all.subarray(head * bins, (head + 1) * bins), site.header.distance_edges, most) as unknown as Node));
  return el("div", { class: "multiples" }, ...charts);
}

function chart(head: number, shares: Float32Array, edges: number[], most: number): SVGElement {
  const wide = (WIDTH - LEFT - 4) / shares.length;
  const y = (share: number) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share / most);
  const name = (bin: number) => {
    const last = (edges[bin + 1] ?? edges[bin]! * 2 - 1) - 1;
    return last > edges[bin]! ? `${edges[bin]} to ${last}` : String(edges[bin]);
  };
  const every = Math.ceil(shares.length / 7);
  const mean = [...shares].map((share, bin) => `${name(bin)}: ${(100 * share).toFixed(1)} %`).join("; ");
  return svg("svg", { class: "chart", "data-save": `head ${head + 1}`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Share by distance: ${mean}` },
    ...ticks(0, most, 3).map((share) => svg("g", {}, svg("line", { class: share === 0 ? "axis" : "rule", x1: LEFT, x2: WIDTH - 4, y1: y(share), y2: y(share) }),
      svg("text", { class: "y", x: LEFT - 5, y: y(share) + 4 }, `${Math.round(100 * share)} %`))),
    ...[...shares].map((share, bin) => svg("rect", { class: "positive", "data-share": share, x: LEFT + bin * wide + 1, width: Math.max(1, wide - 2), y: y(share), height: y(0) - y(share) },
      svg("title", {}, `${name(bin)}: ${(100 * share).toFixed(1)} %`))),
    ...edges.slice(0, shares.length).map((edge, bin) => bin % every === 0 ? svg("text", { class: "x", x: LEFT + (bin + 0.5) * wide, y: HEIGHT - BOTTOM + 14 }, short(edge)) : null),
    svg("text", { class: "x", x: (LEFT + WIDTH) / 2, y: HEIGHT - 4 }, "distance, first of each bin (tokens)"));
}

function short(edge: number): string {
  return edge >= 1000 ? `${Math.round(edge / 1000)}k` : String(edge);
}
