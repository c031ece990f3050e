/** A matrix on a canvas that scrolls and zooms through any number of tokens: only what is on the screen is computed. */

import { step } from "./axes";
import { color, context, el } from "./dom";
import type { Palette } from "./palette";
import { type Source, TILE, Tiles } from "./tiles";
import { isolated } from "./tokens";

const BUDGET = 9; // milliseconds a frame
const ZOOMS = [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 12, 16, 24, 32];
const WORDS = 16; // points a cell from which on tokens are written out
const STRIP = 7;

export interface Strip {
  name: string;
  /** The colour of a query, and of a key. */
  row(row: number): string;
  column(column: number): string;
}

export interface GridContent {
  source: Source;
  palette: Palette;
  top: number;
  rowToken(row: number): string;
  columnToken(column: number): string;
  /** What is written at a column: its position. */
  columnNumber(column: number): number;
  /** What columns are: keys, or slots that stand for several tokens. */
  columnKind: string;
  strips: Strip[];
  /** A picture of the whole, shown where tiles are not ready. */
  preview: HTMLCanvasElement | null;
}

export interface Cell {
  row: number;
  column: number;
}

export class Grid {
  readonly root: HTMLElement;
  pinned: Cell = { row: -1, column: -1 };
  private readonly canvas = el("canvas", { "aria-hidden": "true" });
  private readonly spacer = el("div", { class: "spacer" }, this.canvas);
  private content!: GridContent;
  private tiles!: Tiles;
  private size = 1;
  private hovered: Cell | null = null;
  private frame = 0;
  private hatch: CanvasPattern | null = null;
  private readonly observer: ResizeObserver;

  constructor(
    name: string,
    private readonly events: { hover(cell: Cell | null): void; pick(cell: Cell): void; scrolled?(): void },
  ) {
    this.canvas.dataset.save = name.split(":")[0]!;
    this.root = el("div", { class: "grid", tabindex: 0, role: "application", "aria-label": name }, this.spacer);
    this.root.addEventListener("scroll", () => {
      this.draw();
      events.scrolled?.();
    });
    this.root.addEventListener("pointermove", (event) => this.hover(this.cellAt(event)));
    this.root.addEventListener("pointerleave", () => this.hover(null));
    this.root.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) events.pick(cell);
    });
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.root);
  }

  get zoom(): number {
    return this.size;
  }

  show(content: GridContent, zoom: number): void {
    this.content = content;
    this.tiles = new Tiles(content.source, content.palette, content.top);
    this.hatch = null;
    this.setZoom(zoom);
  }

  /** Points a cell; 0: as large as the whole fits, or words can be read. */
  setZoom(zoom: number): void {
    this.root.style.maxHeight = "";
    this.size = zoom > 0 ? nearest(zoom) : this.fitting();
    this.root.style.maxHeight = `${this.above + this.content.source.rows * this.size + 32}px`; // no more than there is
    this.spacer.style.width = `${this.left + this.content.source.columns * this.size + 12}px`;
    this.spacer.style.height = `${this.above + this.content.source.rows * this.size + 12}px`;
    this.draw();
  }

  /** The next greater or smaller zoom. */
  step(direction: 1 | -1): number {
    return ZOOMS[Math.min(Math.max(ZOOMS.indexOf(this.size) + direction, 0), ZOOMS.length - 1)]!;
  }

  /** Scrolls until the cell is on the screen. */
  reveal(row: number, column: number, middle = false): void {
    const wide = this.root.clientWidth - this.left;
    const high = this.root.clientHeight - this.above;
    if (row >= 0) this.root.scrollTop = into(this.root.scrollTop, row * this.size, this.size, high, middle);
    if (column >= 0) this.root.scrollLeft = into(this.root.scrollLeft, column * this.size, this.size, wide, middle);
  }

  draw(): void {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paint());
  }

  end(): void {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  private get words(): boolean {
    return this.size >= WORDS;
  }

  private get left(): number {
    return (this.words ? 138 : 66) + this.content.strips.length * (STRIP + 2);
  }

  private get above(): number {
    return (this.words ? 122 : 44) + this.content.strips.length * (STRIP + 2);
  }

  private fitting(): number {
    const { rows, columns } = this.content.source;
    const room = (zoom: number) => {
      this.size = zoom;
      const wide = (this.root.clientWidth || 640) - this.left - 12;
      const high = (this.root.clientHeight || 560) - this.above - 12;
      return rows * zoom <= high && columns * zoom <= wide;
    };
    const fits = [...ZOOMS].reverse().find(room) ?? ZOOMS[0]!;
    return Math.max(fits, rows > 4096 ? 1 : 0); // whole long texts are in the overview
  }

  private cellAt(event: MouseEvent): Cell | null {
    const box = this.root.getBoundingClientRect();
    const x = event.clientX - box.left - this.left;
    const y = event.clientY - box.top - this.above;
    if (x < 0 || y < 0) return null;
    const column = Math.floor((x + this.root.scrollLeft) / this.size);
    const row = Math.floor((y + this.root.scrollTop) / this.size);
    return row < this.content.source.rows && column < this.content.source.columns ? { row, column } : null;
  }

  private hover(cell: Cell | null): void {
    if (cell?.row === this.hovered?.row && cell?.column === this.hovered?.column) return;
    this.hovered = cell;
    this.events.hover(cell);
    this.draw();
  }

  private paint(): void {
    this.frame = 0;
    if (!this.canvas.isConnected || !this.root.clientWidth) return;
    const [width, height] = [this.root.clientWidth, this.root.clientHeight];
    const ctx = context(this.canvas, width, height);
    const { rows, columns } = this.content.source;
    const [x0, y0] = [this.root.scrollLeft / this.size, this.root.scrollTop / this.size];
    const right = Math.min(columns, x0 + (width - this.left) / this.size);
    const bottom = Math.min(rows, y0 + (height - this.above) / this.size);
    ctx.save();
    ctx.beginPath();
    ctx.rect(this.left, this.above, (right - x0) * this.size, (bottom - y0) * this.size);
    ctx.clip();
    const ready = this.cells(ctx, x0, y0, right, bottom);
    this.marked(ctx, x0, y0, right, bottom);
    ctx.restore();
    ctx.strokeStyle = color("line");
    ctx.strokeRect(this.left - 0.5, this.above - 0.5, (right - x0) * this.size + 1, (bottom - y0) * this.size + 1);
    this.axis(ctx, x0, right, true);
    this.axis(ctx, y0, bottom, false);
    this.canvas.dataset.rows = `${Math.floor(y0)}-${Math.ceil(bottom) - 1}`;
    this.canvas.dataset.computed = `${this.tiles.first}-${this.tiles.last}`;
    this.canvas.dataset.origin = `${this.left} ${this.above} ${this.size}`;
    this.canvas.dataset.ready = String(ready);
    if (!ready) this.draw();
  }

  private cells(ctx: CanvasRenderingContext2D, x0: number, y0: number, right: number, bottom: number): boolean {
    const level = Math.max(0, -Math.log2(this.size));
    const span = TILE * 2 ** level; // cells of a tile
    const points = span * this.size;
    const deadline = performance.now() + BUDGET;
    ctx.fillStyle = this.hatch ??= hatching(ctx);
    ctx.fillRect(this.left, this.above, (right - x0) * this.size, (bottom - y0) * this.size);
    ctx.imageSmoothingEnabled = false;
    let complete = true;
    for (let row = Math.floor(y0 / span); row * span < bottom; row++) {
      for (let column = Math.floor(x0 / span); column * span < right; column++) {
        const { canvas, ready } = this.tiles.get(level, row, column, deadline);
        const [x, y] = [this.left + (column * span - x0) * this.size, this.above + (row * span - y0) * this.size];
        if (!ready) this.preview(ctx, x, y, points, row * span, column * span, span);
        ctx.drawImage(canvas, x, y, points, points);
        complete &&= ready;
      }
    }
    return complete;
  }

  private preview(ctx: CanvasRenderingContext2D, x: number, y: number, points: number, row: number, column: number, span: number): void {
    const image = this.content.preview;
    if (!image) return;
    const [sx, sy] = [image.width / this.content.source.columns, image.height / this.content.source.rows];
    ctx.globalAlpha = 0.5;
    ctx.drawImage(image, column * sx, row * sy, span * sx, span * sy, x, y, points, points);
    ctx.globalAlpha = 1;
  }

  /** The pinned row and key, and the cell under the pointer. */
  private marked(ctx: CanvasRenderingContext2D, x0: number, y0: number, right: number, bottom: number): void {
    const size = Math.max(this.size, 2);
    const y = (row: number) => this.above + (row - y0) * this.size;
    const x = (column: number) => this.left + (column - x0) * this.size;
    ctx.lineWidth = 1.5;
    ctx.strokeStyle = color("accent");
    if (this.pinned.row >= 0) ctx.strokeRect(this.left - 2, y(this.pinned.row), (right - x0) * this.size + 4, size);
    if (this.pinned.column >= 0) {
      ctx.setLineDash([3, 3]);
      ctx.strokeRect(x(this.pinned.column), this.above - 2, size, (bottom - y0) * this.size + 4);
      ctx.setLineDash([]);
    }
    if (this.hovered) {
      ctx.strokeStyle = color("ink");
      ctx.strokeRect(x(this.hovered.column), y(this.hovered.row), size, size);
    }
    ctx.lineWidth = 1;
  }

  /** Ticks, tokens, strips and the name of one axis. */
  private axis(ctx: CanvasRenderingContext2D, from: number, to: number, across: boolean): void {
    const edge = across ? this.above : this.left;
    const begin = across ? this.left : this.above;
    const shift = this.content.strips.length * (STRIP + 2);
    const at = (index: number) => begin + (index + 0.5 - from) * this.size;
    const every = this.words ? 1 : step((across ? 46 : 30) / this.size);
    ctx.save();
    ctx.beginPath();
    if (across) ctx.rect(this.left, 0, ctx.canvas.width, this.above);
    else ctx.rect(0, this.above, this.left, ctx.canvas.height);
    ctx.clip();
    ctx.font = `${this.words ? 12 : 11}px ${color("sans")}`;
    ctx.textBaseline = "middle";
    ctx.strokeStyle = ctx.fillStyle = color("soft");
    this.stripes(ctx, from, to, at, across);
    const number = (index: number) => (across ? this.content.columnNumber(index) : index);
    const first = this.words ? Math.floor(from) : Math.ceil(from / every) * every;
    for (let index = first; index < to; index += every) {
      const p = at(index);
      const active = across ? index === this.hovered?.column || index === this.pinned.column : index === this.hovered?.row || index === this.pinned.row;
      ctx.fillStyle = active ? color("ink") : color("soft");
      const token = across ? this.content.columnToken(index) : this.content.rowToken(index);
      const text = this.words ? `${isolated(token, 12)}\u2002${number(index)}` : String(number(index));
      if (across) {
        ctx.fillRect(p - 0.5, edge - shift - 5, 1, 4);
        ctx.save();
        ctx.translate(p, edge - shift - 8);
        if (this.words) ctx.rotate(-Math.PI / 3);
        ctx.textAlign = this.words ? "left" : "center";
        ctx.fillText(text, 0, this.words ? 0 : -4);
        ctx.restore();
      } else {
        ctx.fillRect(edge - shift - 5, p - 0.5, 4, 1);
        ctx.textAlign = "right";
        ctx.fillText(text, edge - shift - 8, p);
      }
    }
    ctx.restore();
    this.title(ctx, across);
  }

  private title(ctx: CanvasRenderingContext2D, across: boolean): void {
    ctx.font = `600 12px ${color("sans")}`;
    ctx.fillStyle = color("ink");
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    if (across) ctx.fillText(`${this.content.columnKind} (${this.words ? "token, " : ""}position) →`, this.left, 3);
    else {
      ctx.save();
      ctx.translate(3, this.above);
      ctx.rotate(-Math.PI / 2);
      ctx.textAlign = "right";
      ctx.fillText(this.words ? "← query (token, position)" : "← query (position)", 0, 0);
      ctx.restore();
    }
  }

  /** Labels of tokens, such as buckets, beside the matrix. */
  private stripes(ctx: CanvasRenderingContext2D, from: number, to: number, at: (index: number) => number, across: boolean): void {
    this.content.strips.forEach((strip, number) => {
      const place = (across ? this.above : this.left) - (number + 1) * (STRIP + 2);
      for (let index = Math.floor(from); index < to; index++) {
        ctx.fillStyle = across ? strip.column(index) : strip.row(index);
        const size = Math.max(1, this.size);
        if (across) ctx.fillRect(at(index) - size / 2, place, size, STRIP);
        else ctx.fillRect(place, at(index) - size / 2, STRIP, size);
      }
    });
  }
}

function into(scroll: number, at: number, size: number, room: number, middle: boolean): number {
  if (middle) return at - room / 2;
  return Math.max(Math.min(scroll, at), at + size - room);
}

function nearest(zoom: number): number {
  return ZOOMS.reduce((best, size) => (Math.abs(Math.log(size / zoom)) < Math.abs(Math.log(best / zoom)) ? size : best));
}

/** What is never computed looks like no weight. */
export function hatching(ctx: CanvasRenderingContext2D): CanvasPattern {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d")!;
  pen.fillStyle = color("empty");
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = color("hatch");
  pen.beginPath();
  for (const x of [-8, 0, 8]) {
    pen.moveTo(x, 8);
    pen.lineTo(x + 8, 0);
  }
  pen.stroke();
  return ctx.createPattern(tile, "repeat")!;
}
