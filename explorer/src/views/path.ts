/** A lane per layer: where what a token knows came from. */

import type { App, View } from "../app";
import { figure, round, step } from "../axes";
import { color, context, el } from "../dom";
import { legend } from "../legend";
import { layers, type Site } from "../model";
import { css, palette } from "../palette";
import { LEAST, through } from "../rollout";
import { bdi, isolated } from "../tokens";

const LANE = 30;
const TOP = 0.1; // the share of the last colour

interface Lane {
  name: string;
  shares: Float64Array;
}

export const path: View = {
  id: "path",
  title: "Path",
  about: "Attention rollout of the pinned token, from the last layer down to the input: each layer takes half from attention (mean of its heads) and half from the token itself (Abnar and Zuidema 2020). Drawn on a square-root scale.",
  fits: () => true,
  build(app, root) {
    const canvas = el("canvas", { class: "lanes", "data-save": "path", role: "img" });
    const status = el("p", { class: "note", role: "status" });
    const readout = el("output", { class: "readout" });
    const side = el("div", { class: "side" });
    const stage = el("div", { class: "wide" }, canvas);
    root.append(legend("share", TOP, false, false), el("div", { class: "split" }, el("div", {}, stage, readout, status), side));
    let running = 0;
    let lanes: Lane[] = [];
    const draw = async () => {
      const own = ++running;
      app.onLeave(() => running++);
      lanes = [];
      canvas.dataset.ready = "false";
      const show = (left: string) => {
        status.textContent = left;
        paint(app, canvas, lanes, stage.clientWidth);
      };
      await follow(app, (lane, left) => {
        lanes.push(lane);
        show(left);
      }, () => own === running);
      if (own !== running) return;
      side.replaceChildren(sources(app, lanes[lanes.length - 1]!));
      canvas.dataset.ready = "true";
      canvas.setAttribute("aria-label", `Shares of ${lanes[0]!.shares.length} tokens in ${lanes.length} lanes; the table lists the input's`);
    };
    void draw();
    canvas.addEventListener("pointermove", (event) => {
      const cell = at(canvas, lanes, event);
      readout.replaceChildren(...(cell ? [`${cell.lane.name}, token ${cell.token} `, bdi(app.site.queryToken(cell.token)), `: ${percent(cell.lane.shares[cell.token]!)}`] : []));
    });
    canvas.addEventListener("click", (event) => {
      const cell = at(canvas, lanes, event);
      if (cell) app.set({ query: cell.token });
    });
    return (changed) => {
      if (["run", "part", "query"].some((name) => changed.has(name as "run"))) void draw();
    };
  },
};

/** The sites that the path leads through: self-attention of the chosen stack. */
function stack(app: App): Site[] {
  const name = app.site.header.stack;
  return layers(app.run, `${name}-self`).filter((site) => site.weights !== null).reverse();
}

async function follow(app: App, add: (lane: Lane, left: string) => void, alive: () => boolean): Promise<void> {
  const sites = stack(app);
  let shares = new Float64Array(app.site.queryCount);
  shares[app.state.query] = 1;
  add({ name: "output", shares }, sites.length ? "computing …" : "The page holds no layer in detail.");
  let last = performance.now();
  const pause = async () => {
    if (performance.now() - last > 12) {
      await new Promise((resume) => setTimeout(resume));
      last = performance.now();
    }
    return alive();
  };
  const missing = layers(app.run, `${app.site.header.stack}-self`).length - sites.length;
  const notes = [`Shares below ${round(LEAST)} are not followed.`, missing ? `${missing} layers without detail are passed by.` : ""].join(" ");
  for (const site of sites) {
    const next = await through(site, shares, pause);
    if (next === null) return;
    shares = next as Float64Array<ArrayBuffer>;
    add({ name: site.header.layer === 0 ? "input" : `below layer ${site.header.layer + 1}`, shares }, notes);
  }
}

const [LEFT, RIGHT] = [112, 24];

/** The first and last token of which any lane has a share that is seen. */
function range(lanes: Lane[]): [number, number] {
  let [from, to] = [Infinity, -1];
  for (const { shares } of lanes) {
    shares.forEach((share, token) => {
      if (share < 2e-4) return;
      from = Math.min(from, token);
      to = Math.max(to, token);
    });
  }
  return shares(lanes) <= 64 ? [0, shares(lanes) - 1] : [from, to];
}

function shares(lanes: Lane[]): number {
  return lanes[0]!.shares.length;
}

function paint(app: App, canvas: HTMLCanvasElement, lanes: Lane[], width: number): void {
  const [from, to] = range(lanes);
  const count = to - from + 1;
  const words = (width - LEFT - RIGHT) / count >= 15;
  const bottom = words ? 100 : 40;
  const ctx = context(canvas, width, lanes.length * LANE + bottom + 8);
  const wide = (width - LEFT - RIGHT) / count;
  const colors = palette(false);
  ctx.font = `12px ${color("sans")}`;
  ctx.textBaseline = "middle";
  lanes.forEach((lane, row) => {
    ctx.fillStyle = color("soft");
    ctx.textAlign = "right";
    ctx.fillText(lane.name, LEFT - 8, row * LANE + LANE / 2);
    ctx.fillStyle = css(colors, 0, TOP);
    ctx.fillRect(LEFT, row * LANE + 3, count * wide, LANE - 6);
    for (let token = from; token <= to; token++) {
      const share = lane.shares[token]!;
      if (share < LEAST) continue;
      ctx.fillStyle = css(colors, share, TOP);
      ctx.fillRect(LEFT + (token - from) * wide, row * LANE + 3, Math.max(1, wide), LANE - 6);
    }
  });
  const y = lanes.length * LANE;
  const every = words ? 1 : step(46 / wide);
  for (let token = Math.ceil(from / every) * every; token <= to; token += every) {
    const x = LEFT + (token - from + 0.5) * wide;
    ctx.fillStyle = token === app.state.query ? color("accent") : color("soft");
    ctx.fillRect(x - 0.5, y, 1, 4);
    ctx.save();
    ctx.translate(x, y + 8);
    if (words) ctx.rotate(-Math.PI / 3);
    ctx.textAlign = words ? "right" : "center";
    ctx.fillText(words ? `${token}\u2002${isolated(app.site.queryToken(token), 10)}` : String(token), 0, words ? 0 : 5);
    ctx.restore();
  }
  ctx.fillStyle = color("ink");
  ctx.font = `600 12px ${color("sans")}`;
  ctx.textAlign = "left";
  ctx.fillText(words ? "token" : "token (position)", 4, y + bottom - 6);
}

function at(canvas: HTMLCanvasElement, lanes: Lane[], event: MouseEvent): { lane: Lane; token: number } | null {
  if (lanes.length === 0) return null;
  const box = canvas.getBoundingClientRect();
  const [from, to] = range(lanes);
  const token = from + Math.floor((event.clientX - box.left - LEFT) / ((box.width - LEFT - RIGHT) / (to - from + 1)));
  const lane = lanes[Math.floor((event.clientY - box.top) / LANE)];
  return lane && token >= from && token <= to ? { lane, token } : null;
}

function percent(share: number): string {
  return `${figure(100 * share)} %`;
}

function sources(app: App, lane: Lane): HTMLElement {
  const order = [...lane.shares.keys()].sort((a, b) => lane.shares[b]! - lane.shares[a]! || a - b).slice(0, 12).filter((token) => lane.shares[token]! > 0);
  const most = lane.shares[order[0] ?? 0]!;
  const rows = order.map((token) => el("tr", { "data-token": token, "data-share": lane.shares[token]! },
    el("td", {}, el("button", { type: "button", click: () => app.set({ query: token }) }, String(token))), el("td", {}, bdi(app.site.queryToken(token))),
    el("td", { class: "number" }, percent(lane.shares[token]!)), el("td", {}, el("meter", { min: 0, max: most, value: lane.shares[token]!, "aria-hidden": "true" }))));
  return el("table", { class: "keys" }, el("caption", {}, `Where token ${app.state.query} `, bdi(app.site.queryToken(app.state.query)), ` comes from (${lane.name}):`),
    el("thead", {}, el("tr", {}, ...["token", "", "share", ""].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows));
}
