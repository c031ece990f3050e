/** What a head gives to a `Grid`. */

import type { GridContent } from "./grid";
import type { Site } from "./model";
import { palette } from "./palette";
import { thumbnail } from "./thumbnail";

export function headGrid(site: Site, head: number, top: number): GridContent {
  return {
    source: {
      rows: site.queryCount,
      columns: site.keyCount,
      spans: (row) => site.allowed.spans(head, row),
      fill: (row, from, to, out) => site.weights!.fill(head, row, from, to, out),
    },
    palette: palette(site.signed),
    top,
    rowToken: (row) => site.queryToken(row),
    columnToken: (column) => site.keyToken(column),
    columnNumber: (column) => site.position(column),
    columnKind: site.kindOfKeys,
    strips: site.marks.map((mark) => {
      const shown = (value: number | null) => (value === null ? "transparent" : mark.color(value));
      return {
        name: mark.name,
        row: (row: number) => shown(site.markOfQuery(mark, head, row)),
        column: (column: number) => shown(site.markOfKey(mark, head, column)),
      };
    }),
    preview: site.signed ? null : thumbnail(site, head, top),
  };
}
