/** The weight of any pair of a query and a key, computed when it is looked at. */

import type { Buffers, Tensor } from "./buffers";
import type { PairsHeader, SiteHeader, WeightsHeader } from "./types";

export interface Weights {
  readonly queries: number;
  readonly keys: number;
  /** Weights of keys from <= key < to, into out. */
  fill(head: number, query: number, from: number, to: number, out: Float32Array): void;
}

/** The terms of a score, as the neuron view adds them up. */
export interface Terms {
  q: Float32Array;
  k: Float32Array;
  products: Float32Array;
  dot: number;
  scale: number;
  position: number;
  score: number;
  lse: number;
  weight: number;
}

/** Weights from stored queries and keys: exp(score - lse). */
export class PairWeights implements Weights {
  readonly queries: number;
  readonly keys: number;
  readonly width: number;
  readonly positioned: boolean;
  private readonly q: Vectors;
  private readonly k: Vectors;
  private readonly lse: Tensor;
  private readonly bias: Tensor | null;
  private readonly byQuery: Tensor | null;
  private readonly byKey: Tensor | null;
  private readonly group: number;
  private readonly offset: number;

  constructor(site: SiteHeader, private readonly pairs: PairsHeader, buffers: Buffers) {
    this.q = new Vectors(buffers.read(pairs.q), buffers.maybe(pairs.q_scales));
    this.k = new Vectors(buffers.read(pairs.k), buffers.maybe(pairs.k_scales));
    this.lse = buffers.read(pairs.lse);
    this.bias = buffers.maybe(pairs.bias);
    this.byQuery = buffers.maybe(pairs.by_query);
    this.byKey = buffers.maybe(pairs.by_key);
    this.positioned = this.bias !== null || this.byQuery !== null || this.byKey !== null;
    this.queries = pairs.q.shape[1]!;
    this.keys = pairs.k.shape[1]!;
    this.width = pairs.q.shape[2]!;
    this.group = site.heads / pairs.k.shape[0]!;
    this.offset = site.kind === "self" ? this.keys - this.queries : 0;
  }

  fill(head: number, query: number, from: number, to: number, out: Float32Array): void {
    const q = this.q.row(head, query);
    const keyHead = Math.floor(head / this.group);
    const lse = this.lse.of(head * this.queries + query);
    for (let key = from; key < to; key++) {
      let score = this.k.dot(keyHead, key, q) * this.pairs.scale;
      if (this.positioned) score += this.position(head, query, key);
      out[key - from] = Math.exp(score - lse);
    }
  }

  terms(head: number, query: number, key: number): Terms {
    const q = this.q.row(head, query).slice();
    const k = this.k.row(Math.floor(head / this.group), key).slice();
    const products = q.map((value, d) => value * k[d]!);
    const dot = products.reduce((sum, value) => sum + value, 0);
    const position = this.position(head, query, key);
    const score = dot * this.pairs.scale + position;
    const lse = this.lse.of(head * this.queries + query);
    return { q, k, products, dot, scale: this.pairs.scale, position, score, lse, weight: Math.exp(score - lse) };
  }

  /** What tables of distances add to the score. */
  private position(head: number, query: number, key: number): number {
    return (
      this.entry(this.bias, head, 0, 1, query, key) +
      this.entry(this.byQuery, head, query, this.queries, query, key) +
      this.entry(this.byKey, head, key, this.keys, query, key)
    );
  }

  /** The entry of a table [H or 1, rows, R] for the distance of the pair. */
  private entry(table: Tensor | null, head: number, row: number, rows: number, query: number, key: number): number {
    if (table === null) return 0;
    const size = table.shape[table.shape.length - 1]!;
    const distance = query + this.offset - key;
    const at = Math.min(Math.max(distance - this.pairs.first, 0), size - 1);
    return table.of(((table.shape[0] === 1 ? 0 : head) * rows + row) * size + at);
  }
}

/** Vectors [H, T, D] of any precision. */
class Vectors {
  private readonly length: number;
  private readonly width: number;
  private readonly current: Float32Array;

  constructor(private readonly values: Tensor, private readonly scales: Tensor | null) {
    this.length = values.shape[1]!;
    this.width = values.shape[2]!;
    this.current = new Float32Array(this.width);
  }

  /** The vector; valid until the next call. */
  row(head: number, token: number): Float32Array {
    const at = head * this.length + token;
    const scale = this.scales === null ? 1 : this.scales.of(at);
    for (let d = 0; d < this.width; d++) this.current[d] = this.values.of(at * this.width + d) * scale;
    return this.current;
  }

  dot(head: number, token: number, other: Float32Array): number {
    const at = head * this.length + token;
    const start = at * this.width;
    let sum = 0;
    if (this.values.data instanceof Uint16Array) {
      for (let d = 0; d < this.width; d++) sum += this.values.of(start + d) * other[d]!;
    } else {
      const data = this.values.data;
      for (let d = 0; d < this.width; d++) sum += data[start + d]! * other[d]!;
    }
    return this.scales === null ? sum : sum * this.scales.of(at);
  }
}

/** Weights that are stored as they are. */
export class StoredWeights implements Weights {
  readonly queries: number;
  readonly keys: number;
  private readonly values: Tensor;
  private readonly unit: number;

  constructor(header: WeightsHeader, buffers: Buffers) {
    this.values = buffers.read(header.values);
    this.unit = header.values.dtype === "uint8" ? 1 / 255 : 1;
    this.queries = header.values.shape[1]!;
    this.keys = header.values.shape[2]!;
  }

  fill(head: number, query: number, from: number, to: number, out: Float32Array): void {
    const start = (head * this.queries + query) * this.keys;
    for (let key = from; key < to; key++) out[key - from] = this.values.of(start + key) * this.unit;
  }
}
