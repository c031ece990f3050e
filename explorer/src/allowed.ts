/** Which keys each query's row holds, as intervals start <= key < stop. */

import type { Buffers, Numbers } from "./buffers";
import type { SiteHeader } from "./types";

export interface Allowed {
  /** start, stop, start, stop, ... in ascending order. */
  spans(head: number, query: number): ArrayLike<number>;
}

export function allowedOf(site: SiteHeader, keys: number, buffers: Buffers): Allowed {
  if (site.allowed === null) {
    const all = [0, keys];
    return { spans: () => all };
  }
  const lists = site.allowed.map((list) => ({
    offsets: buffers.read(list.offsets).data,
    starts: buffers.read(list.starts).data,
    stops: buffers.read(list.stops).data,
  }));
  const ofHead = site.allowed_of_head ?? [];
  return { spans: (head, query) => spans(lists[ofHead[head] ?? 0]!, query) };
}

function spans(list: { offsets: Numbers; starts: Numbers; stops: Numbers }, query: number): number[] {
  const out: number[] = [];
  for (let at = list.offsets[query]!; at < list.offsets[query + 1]!; at++) out.push(list.starts[at]!, list.stops[at]!);
  return out;
}

/** Whether key lies in one of the intervals. */
export function contains(spans: ArrayLike<number>, key: number): boolean {
  for (let at = 0; at < spans.length; at += 2) {
    if (key >= spans[at]! && key < spans[at + 1]!) return true;
  }
  return false;
}

/** The intervals of both lists together. */
export function united(a: ArrayLike<number>, b: ArrayLike<number>): number[] {
  const all: [number, number][] = [];
  for (const list of [a, b]) {
    for (let at = 0; at < list.length; at += 2) all.push([list[at]!, list[at + 1]!]);
  }
  all.sort((x, y) => x[0] - y[0]);
  const out: number[] = [];
  for (const [start, stop] of all) {
    if (out.length > 0 && start <= out[out.length - 1]!) out[out.length - 1] = Math.max(out[out.length - 1]!, stop);
    else out.push(start, stop);
  }
  return out;
}
