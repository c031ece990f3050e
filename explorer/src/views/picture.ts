/** Weights of a pinned patch, over the picture that it is part of. */

import type { App, View } from "../app";
import { figure } from "../axes";
import { color, context, el } from "../dom";
import { legend } from "../legend";
import { css, palette } from "../palette";
import { pinnedTable } from "../table";
import type { PixelsHeader } from "../types";
import type { Buffers } from "../buffers";

export function pictureView(buffers: Buffers): View {
  return {
    id: "picture",
    title: "Picture",
    about: "The weights of the pinned patch over the picture. Click a patch, or go to it with the arrow keys, to pin it.",
    fits: (app) => app.runs.some((run) => run.header.pixels !== null),
    build(app, root) {
      const canvas = el("canvas", { class: "picture", tabindex: 0, role: "application", "aria-label": "Picture of patches" });
      const side = el("div", { class: "side" });
      const readout = el("output", { class: "readout" });
      const tools = el("div", { class: "tools" });
      root.append(tools, el("div", { class: "split" }, el("div", {}, canvas, readout), side));
      const draw = () => {
        const { pixels } = app.run.header;
        tools.replaceChildren(legend("weight", app.site.scale(app.state.head), false, false), el("span", { class: "buttons" }, ...extras(app, pixels)));
        side.replaceChildren(pinnedTable(app));
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

/** Tokens before the first patch, such as the class token. */
function extras(app: App, pixels: PixelsHeader | null): HTMLElement[] {
  return Array.from({ length: pixels?.first ?? 0 }, (_, query) =>
    el("button", { type: "button", "aria-pressed": String(app.state.query === query), click: () => app.set({ query }) }, app.site.queryToken(query)));
}

function grid(pixels: PixelsHeader): [number, number] {
  return [Math.floor(pixels.height / pixels.patch[0]), Math.floor(pixels.width / pixels.patch[1])];
}

function paint(app: App, canvas: HTMLCanvasElement, pixels: PixelsHeader, buffers: Buffers): void {
  const { height, width, channels, first, patch } = pixels;
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
  const [, columns] = grid(pixels);
  const [high, wide] = [patch[0] * zoom, patch[1] * zoom];
  const { head, query } = app.state;
  const top = app.site.scale(head);
  const colors = palette(app.site.signed);
  ctx.globalAlpha = 0.68;
  for (const { key, weight } of app.site.row(head, query)) {
    const token = app.site.position(key) - first;
    if (token < 0) continue;
    ctx.fillStyle = css(colors, weight, top);
    ctx.fillRect((token % columns) * wide, Math.floor(token / columns) * high, wide, high);
  }
  ctx.globalAlpha = 1;
  const own = query - first;
  if (own < 0) return;
  ctx.strokeStyle = color("accent");
  ctx.lineWidth = 3;
  ctx.strokeRect((own % columns) * wide + 1.5, Math.floor(own / columns) * high + 1.5, wide - 3, high - 3);
}

function where(app: App, pixels: PixelsHeader): string {
  const own = app.state.query - pixels.first;
  const columns = grid(pixels)[1];
  const best = app.site.top(app.state.head, app.state.query, 1)[0];
  const place = own < 0 ? "a token that is no patch" : `patch in row ${Math.floor(own / columns)}, column ${own % columns}`;
  return `Pinned: ${place}.${best ? ` Its greatest weight is ${figure(best.weight)}.` : ""}`;
}

function pin(app: App, canvas: HTMLCanvasElement, event: MouseEvent): void {
  const { pixels } = app.run.header;
  if (!pixels) return;
  const box = canvas.getBoundingClientRect();
  const [rows, columns] = grid(pixels);
  const row = Math.min(rows - 1, Math.floor(((event.clientY - box.top) / box.height) * rows));
  const column = Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * columns));
  app.set({ query: pixels.first + row * columns + column });
}

function move(app: App, event: KeyboardEvent): void {
  const { pixels } = app.run.header;
  if (!pixels) return;
  const columns = grid(pixels)[1];
  const by = { ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by === undefined) return;
  app.set({ query: app.state.query + by }, true);
  event.preventDefault();
}
