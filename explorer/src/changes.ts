/** What a function of scores adds to each, looked up pair by pair. */

import type { Allowed } from "./allowed";
import type { Buffers, Tensor } from "./buffers";
import type { ChangeHeader } from "./types";

export class PairChange {
  readonly name: string;
  private readonly values: Tensor;
  /** Of each head where the entries of each of its queries begin. */
  private readonly begins: Map<number, number>[] = [];

  constructor(header: ChangeHeader, private readonly allowed: Allowed, heads: number, queries: number, buffers: Buffers) {
    this.name = header.name;
    this.values = buffers.read(header.values);
    const rows = header.rows === null ? Array.from({ length: queries }, (_, query) => query) : [...buffers.read(header.rows).data];
    let at = 0;
    for (let head = 0; head < heads; head++) {
      const begins = new Map<number, number>();
      for (const query of rows) {
        begins.set(query, at);
        const spans = allowed.spans(head, query);
        for (let i = 0; i < spans.length; i += 2) at += spans[i + 1]! - spans[i]!;
      }
      this.begins.push(begins);
    }
  }

  has(query: number): boolean {
    return this.begins[0]!.has(query);
  }

  /** Nothing for a pair that is not computed. */
  of(head: number, query: number, key: number): number {
    let at = this.begins[head]!.get(query)!;
    const spans = this.allowed.spans(head, query);
    for (let i = 0; i < spans.length; i += 2) {
      if (key < spans[i]!) return 0;
      if (key < spans[i + 1]!) return this.values.of(at + key - spans[i]!);
      at += spans[i + 1]! - spans[i]!;
    }
    return 0;
  }
}
