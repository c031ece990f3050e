/** The weight of any pair of a query and a key, computed when it is looked at. */

import type { Allowed } from "./allowed";
import type { Buffers, Tensor } from "./buffers";
import { PairChange } from "./changes";
import type { PairsHeader, Reference, SiteHeader, WeightsHeader } from "./types";

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
  /** What positions, and then functions of the score, add to it, by what it is. */
  positions: [string, number][];
  score: number;
  lse: number;
  weight: number;
}

/** Weights from stored queries and keys: exp(score - lse). */
export class PairWeights implements Weights {
  readonly queries: number;
  readonly keys: number;
  readonly width: number;
  private readonly q: Vectors;
  private readonly k: Vectors;
  private readonly lse: Tensor;
  private readonly bias: Tensor | null;
  private readonly positionKeys: Vectors | null;
  private readonly content: Vectors;
  private readonly positionQueries: Vectors | null;
  private readonly projected: Set<number>;
  private readonly projectedK: Vectors | null;
  private readonly group: number;
  private readonly offset: number;
  private readonly distance: ScoreTerm[];
  private readonly changes: PairChange[];

  constructor(site: SiteHeader, private readonly pairs: PairsHeader, allowed: Allowed, buffers: Buffers) {
    const vectors = (values: Reference | undefined, scales: Reference | null | undefined) =>
      values === undefined ? null : new Vectors(buffers.read(values), buffers.maybe(scales ?? null));
    this.q = vectors(pairs.q, pairs.q_scales)!;
    this.k = vectors(pairs.k, pairs.k_scales)!;
    this.lse = buffers.read(pairs.lse);
    this.bias = buffers.maybe(pairs.bias);
    this.positionKeys = vectors(pairs.position_keys, pairs.position_keys_scales);
    this.content = vectors(pairs.content, pairs.content_scales) ?? this.q;
    this.positionQueries = vectors(pairs.position_queries, pairs.position_queries_scales);
    this.projectedK = vectors(pairs.projected_k, pairs.projected_k_scales);
    this.projected = new Set(pairs.projected === null ? [] : buffers.read(pairs.projected).data);
    this.queries = pairs.q.shape[1]!;
    this.keys = pairs.k.shape[1]!;
    this.width = pairs.q.shape[2]!;
    this.group = site.heads / pairs.k.shape[0]!;
    this.offset = site.kind === "self" && site.slots === null ? this.keys - this.queries : 0;
    this.distance = this.distanceTerms();
    this.changes = pairs.changes.map((change) => new PairChange(change, allowed, site.heads, this.queries, buffers));
  }

  fill(head: number, query: number, from: number, to: number, out: Float32Array): void {
    const q = this.q.row(head, query);
    const keyHead = Math.floor(head / this.group);
    const lse = this.lse.of(head * this.queries + query);
    const k = this.keysOf(query);
    const terms = this.termsOf(query);
    for (let key = from; key < to; key++) {
      let score = k.dot(keyHead, key, q) * this.pairs.scale;
      for (const term of terms) score += term.of(head, query, key);
      out[key - from] = Math.exp(score - lse);
    }
  }

  terms(head: number, query: number, key: number): Terms {
    const q = this.q.row(head, query).slice();
    const k = this.keysOf(query).row(Math.floor(head / this.group), key).slice();
    const products = q.map((value, d) => value * k[d]!);
    const dot = products.reduce((sum, value) => sum + value, 0);
    const positions = this.termsOf(query).map((term): [string, number] => [term.name, term.of(head, query, key)]);
    const score = positions.reduce((sum, [, value]) => sum + value, dot * this.pairs.scale);
    const lse = this.lse.of(head * this.queries + query);
    return { q, k, products, dot, scale: this.pairs.scale, positions, score, lse, weight: Math.exp(score - lse) };
  }

  /** What is added to the scores of a query; keys of projections of their own stand in no table of distances. */
  private termsOf(query: number): ScoreTerm[] {
    const changes = this.changes.filter((change) => change.has(query));
    return this.projected.has(query) ? changes : [...this.distance, ...changes];
  }

  /** The keys that a query reads. */
  private keysOf(query: number): Vectors {
    return this.projectedK !== null && this.projected.has(query) ? this.projectedK : this.k;
  }

  /** What tables of distances add to the score. */
  private distanceTerms(): ScoreTerm[] {
    const { positionKeys, positionQueries, bias, content } = this;
    const entry = (query: number, key: number, size: number) => Math.min(Math.max(query + this.offset - key - this.pairs.first, 0), size - 1);
    const terms: ScoreTerm[] = [];
    if (positionKeys !== null) {
      terms.push({
        name: content === this.q ? "query · vector of the distance" : "query with its bias · vector of the distance",
        of: (head, query, key) => positionKeys.dot(positionKeys.head(head), entry(query, key, positionKeys.length), content.row(head, query)) * this.pairs.scale,
      });
    }
    if (positionQueries !== null) {
      terms.push({
        name: "key · vector of the distance",
        of: (head, query, key) => positionQueries.dot(positionQueries.head(head), entry(query, key, positionQueries.length), this.k.row(Math.floor(head / this.group), key)) * this.pairs.scale,
      });
    }
    if (bias !== null) {
      const [heads, size] = bias.shape as [number, number];
      terms.push({ name: "bias of the distance", of: (head, query, key) => bias.of((heads === 1 ? 0 : head) * size + entry(query, key, size)) });
    }
    return terms;
  }
}

/** A term of the score. */
interface ScoreTerm {
  name: string;
  of(head: number, query: number, key: number): number;
}

/** Vectors [H, T, D] of any precision. */
class Vectors {
  readonly length: number;
  private readonly width: number;
  private readonly current: Float32Array;

  constructor(private readonly values: Tensor, private readonly scales: Tensor | null) {
    this.length = values.shape[1]!;
    this.width = values.shape[2]!;
    this.current = new Float32Array(this.width);
  }

  /** Of these vectors the head that a query's head meets: they may be one for all. */
  head(head: number): number {
    return this.values.shape[0] === 1 ? 0 : head;
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
