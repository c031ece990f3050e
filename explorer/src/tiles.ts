/** Pictures of 64 x 64 points of a matrix, computed when they come on the screen and kept. */

import { entry, type Palette } from "./palette";

export const TILE = 64;
const KEPT = 1500;

/** A matrix that is computed as it is looked at. */
export interface Source {
  rows: number;
  columns: number;
  spans(row: number): ArrayLike<number>;
  fill(row: number, from: number, to: number, out: Float32Array): void;
}

interface Tile {
  canvas: HTMLCanvasElement;
  image: ImageData;
  /** Rows of points that are computed. */
  done: number;
}

export class Tiles {
  /** Rows of the matrix of which something was computed, for the page to say. */
  first = Infinity;
  last = -1;
  private readonly tiles = new Map<string, Tile>();
  private scratch = new Float32Array(TILE);

  constructor(private readonly source: Source, private readonly palette: Palette, private readonly top: number) {}

  /** The tile at (row, column) of tiles with 2^level cells a point; worked on until the deadline. */
  get(level: number, row: number, column: number, deadline: number): { canvas: HTMLCanvasElement; ready: boolean } {
    const key = `${level}/${row}/${column}`;
    let tile = this.tiles.get(key);
    if (tile === undefined) {
      const canvas = document.createElement("canvas");
      canvas.width = canvas.height = TILE;
      tile = { canvas, image: new ImageData(TILE, TILE), done: 0 };
      if (this.tiles.size >= KEPT) this.tiles.delete(this.tiles.keys().next().value!);
    }
    this.tiles.delete(key); // the last to be looked at is the last to be forgotten
    this.tiles.set(key, tile);
    if (tile.done < TILE && performance.now() < deadline) {
      do this.points(tile, level, row, column);
      while (tile.done < TILE && performance.now() < deadline);
      tile.canvas.getContext("2d")!.putImageData(tile.image, 0, 0);
    }
    return { canvas: tile.canvas, ready: tile.done === TILE };
  }

  /** The tile's next row of points: of the cells in each point the greatest. */
  private points(tile: Tile, level: number, tileRow: number, tileColumn: number): void {
    const cells = 2 ** level;
    const y = tile.done++;
    const [left, right] = [tileColumn * TILE * cells, Math.min((tileColumn + 1) * TILE * cells, this.source.columns)];
    const start = (tileRow * TILE + y) * cells;
    const greatest = new Float32Array(TILE);
    const seen = new Uint8Array(TILE);
    for (let row = start; row < Math.min(start + cells, this.source.rows); row++) {
      const spans = this.source.spans(row);
      for (let at = 0; at < spans.length; at += 2) {
        const [from, to] = [Math.max(spans[at]!, left), Math.min(spans[at + 1]!, right)];
        if (from < to) this.run(row, from, to, left, cells, greatest, seen);
      }
    }
    const { colors, signed } = this.palette;
    for (let x = 0; x < TILE; x++) {
      if (!seen[x]) continue;
      const color = 3 * entry(greatest[x]!, this.top, signed);
      const pixel = 4 * (y * TILE + x);
      for (let c = 0; c < 3; c++) tile.image.data[pixel + c] = colors[color + c]!;
      tile.image.data[pixel + 3] = 255;
    }
  }

  private run(row: number, from: number, to: number, left: number, cells: number, greatest: Float32Array, seen: Uint8Array): void {
    if (this.scratch.length < to - from) this.scratch = new Float32Array(to - from);
    this.source.fill(row, from, to, this.scratch);
    this.first = Math.min(this.first, row);
    this.last = Math.max(this.last, row);
    for (let key = from; key < to; key++) {
      const x = Math.floor((key - left) / cells);
      const weight = this.scratch[key - from]!;
      if (!seen[x] || Math.abs(weight) > Math.abs(greatest[x]!)) greatest[x] = weight;
      seen[x] = 1;
    }
  }
}
