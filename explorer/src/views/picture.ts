/** Weights of a pinned patch, over the picture that it is part of. */

import type { App, View } from "../app";
import { figure } from "../axes";
import { color, context, el } from "../dom";
import { legend } from "../legend";
import { css, palette } from "../palette";
import { prediction } from "../prediction";
import { pinnedTable } from "../table";
import type { PixelsHeader } from "../types";
import type { Buffers } from "../buffers";

export function pictureView(buffers: Buffers): View {
  return {
    id: "picture",
    title: "Picture",
    about: "What the model reads and predicts. Click a patch, or go to it with the arrow keys, to pin it and to see its weights over the picture, each patch in the colour of what it gets.",
    fits: (app) => app.runs.some((run) => run.header.pixels !== null),
    build(app, root) {
      const canvas = el("canvas", { class: "picture", "data-save": "picture", tabindex: 0, role: "application", "aria-label": "Picture of patches" });
      const side = el("div", { class: "side" });
      const readout = el("output", { class: "readout" });
      const tools = el("div", { class: "tools" });
      root.append(tools, el("div", { class: "split" }, el("div", {}, canvas, readout), side));
      const draw = () => {
        const { pixels } = app.run.header;
        const focused = (document.activeElement as HTMLElement | null)?.dataset["overlay"];
        tools.replaceChildren(overlay(app), ...(app.state.overlay ? [legend("weight", app.site.scale(app.state.head), false, false)] : []),
          el("span", { class: "buttons" }, ...extras(app, pixels)));
        if (focused) tools.querySelector<HTMLElement>("[data-overlay]")?.focus();
        side.replaceChildren(prediction(app) ?? "", pinnedTable(app));
        if (pixels) paint(app, canvas, pixels, buffers);
        readout.textContent = pixels ? where(app, pixels) : "This run read no picture.";
      };
      canvas.addEventListener("click", (event) => pin(app, canvas, event));
      canvas.addEventListener("keydown", (event) => move(app, event));
      draw();
      return draw;
    },
  };
}

/** Turns the weights over the picture on and off. */
function overlay(app: App): HTMLElement {
  return el("button", { type: "button", "data-overlay": "", "aria-pressed": String(app.state.overlay === 1), click: () => app.set({ overlay: 1 - app.state.overlay }) }, "Weights over the picture");
}

/** Tokens that no place of the picture stands for: those before the first patch, such as the class token, and the pinned pixel's colours. */
function extras(app: App, pixels: PixelsHeader | null): HTMLElement[] {
  if (!pixels) return [];
  const before = Array.from({ length: pixels.first }, (_, token) => token);
  const patch = patchOf(app.state.query, pixels);
  const colours = pixels.tokens > 1 && patch >= 0 ? Array.from({ length: pixels.tokens }, (_, i) => pixels.first + patch * pixels.tokens + i) : [];
  return [...before, ...colours].map((query) =>
    el("button", { type: "button", "aria-pressed": String(app.state.query === query), click: () => app.set({ query, overlay: 1 }) }, app.site.queryToken(query)));
}

/** The patch that a token is of; negative for those before the first. */
function patchOf(token: number, pixels: PixelsHeader): number {
  return Math.floor((token - pixels.first) / pixels.tokens);
}

/** What each patch gets of a query: the weights of its tokens together. */
function shares(app: App, pixels: PixelsHeader): Map<number, number> {
  const { head, query } = app.state;
  const sums = new Map<number, number>();
  for (const [token, weight] of app.site.shares(head, query)) {
    const patch = patchOf(token, pixels);
    if (patch >= 0) sums.set(patch, (sums.get(patch) ?? 0) + weight);
  }
  return sums;
}

/** Rows and columns of patches: those of a stage cover what lies at the border too. */
function grid(app: App, pixels: PixelsHeader): [number, number] {
  const whole = app.site.header.stack in pixels.patches ? Math.ceil : Math.floor;
  const [high, wide] = sizeOf(app, pixels);
  return [whole(pixels.height / high), whole(pixels.width / wide)];
}

/** Of the patches of what is shown. */
function sizeOf(app: App, pixels: PixelsHeader): [number, number] {
  return pixels.patches[app.site.header.stack] ?? pixels.patch;
}

function paint(app: App, canvas: HTMLCanvasElement, pixels: PixelsHeader, buffers: Buffers): void {
  const { height, width, channels } = pixels;
  const data = buffers.read(pixels.data);
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < width * height; pixel++) {
    for (let c = 0; c < 3; c++) image.data[4 * pixel + c] = data.of(pixel * channels + (channels >= 3 ? c : 0));
    image.data[4 * pixel + 3] = 255;
  }
  const source = document.createElement("canvas");
  source.width = width;
  source.height = height;
  source.getContext("2d")!.putImageData(image, 0, 0);
  const zoom = Math.min(560 / width, 520 / height);
  const ctx = context(canvas, width * zoom, height * zoom);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(source, 0, 0, width * zoom, height * zoom);
  if (!app.state.overlay) return;
  const [, columns] = grid(app, pixels);
  const patch = sizeOf(app, pixels);
  const [high, wide] = [patch[0] * zoom, patch[1] * zoom];
  const { head, query } = app.state;
  const top = app.site.scale(head);
  const colors = palette(app.site.signed);
  ctx.globalAlpha = 0.68;
  for (const [place, weight] of shares(app, pixels)) {
    ctx.fillStyle = css(colors, weight, top);
    ctx.fillRect((place % columns) * wide, Math.floor(place / columns) * high, wide, high);
  }
  ctx.globalAlpha = 1;
  const own = patchOf(query, pixels);
  if (own < 0) return;
  ctx.strokeStyle = color("accent");
  ctx.lineWidth = 3;
  ctx.strokeRect((own % columns) * wide + 1.5, Math.floor(own / columns) * high + 1.5, wide - 3, high - 3);
}

function where(app: App, pixels: PixelsHeader): string {
  const own = patchOf(app.state.query, pixels);
  const columns = grid(app, pixels)[1];
  const most = Math.max(...shares(app, pixels).values());
  const place = own < 0 ? "a token that is no patch" : `patch in row ${Math.floor(own / columns)}, column ${own % columns}`;
  return `Pinned: ${place}.${most > -Infinity ? ` The greatest weight of a patch is ${figure(most, 4)}.` : ""}`;
}

function pin(app: App, canvas: HTMLCanvasElement, event: MouseEvent): void {
  const { pixels } = app.run.header;
  if (!pixels) return;
  const box = canvas.getBoundingClientRect();
  const [rows, columns] = grid(app, pixels);
  const row = Math.min(rows - 1, Math.floor(((event.clientY - box.top) / box.height) * rows));
  const column = Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * columns));
  app.set({ query: pixels.first + (row * columns + column) * pixels.tokens, overlay: 1 });
}

function move(app: App, event: KeyboardEvent): void {
  const { pixels } = app.run.header;
  if (!pixels) return;
  const columns = grid(app, pixels)[1];
  const by = { ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by === undefined) return;
  app.set({ query: app.state.query + by * pixels.tokens, overlay: 1 }, true);
  event.preventDefault();
}
