/** The whole of a head in at most 48 x 48 cells, made when the model ran. */

import type { Site } from "./model";
import { palette } from "./palette";

export function thumbnail(site: Site, head: number, top = 1): HTMLCanvasElement {
  const [, rows, columns] = site.thumbnails.shape as [number, number, number];
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  const { colors } = palette(false);
  const gain = 1 / Math.sqrt(top);
  for (let cell = 0; cell < rows * columns; cell++) {
    const value = Math.min(255, Math.round(site.thumbnails.of(head * rows * columns + cell) * gain));
    for (let c = 0; c < 3; c++) image.data[4 * cell + c] = colors[3 * value + c]!;
    image.data[4 * cell + 3] = 255;
  }
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas;
}
