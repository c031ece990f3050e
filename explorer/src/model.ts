/** The page's data with its arrays decoded: runs, and the calls of attention in each. */

import { type Allowed, allowedOf, contains } from "./allowed";
import { type Buffers, type Tensor } from "./buffers";
import { figure } from "./axes";
import { css, label, palette } from "./palette";
import type { EffectsHeader, Header, LookupHeader, MarkHeader, RunHeader, SiteHeader } from "./types";
import { PairWeights, StoredWeights, type Weights } from "./weights";

/** What is said of each token. */
export class Mark {
  readonly length: number;
  readonly values: Tensor;
  /** Of amounts the greatest; 0 for labels. */
  readonly top: number;

  constructor(readonly header: MarkHeader, buffers: Buffers) {
    this.values = buffers.read(header.values);
    this.length = header.values.shape[1]!;
    const amounts = header.values.dtype === "float32";
    this.top = amounts ? Math.max(...this.values.slice(0, this.values.data.length), 1e-30) : 0;
  }

  get name(): string {
    return this.header.name;
  }

  /** The number of a token that it is of; null for none. */
  at(head: number, token: number): number | null {
    if (token < 0 || token >= this.length) return null;
    const value = this.values.of((this.header.values.shape[0] === 1 ? 0 : head) * this.length + token);
    return this.top === 0 && value < 0 ? null : value;
  }

  said(value: number): string {
    return this.top > 0 ? figure(value) : (this.header.names[value] ?? String(value));
  }

  color(value: number): string {
    return this.top > 0 ? css(palette(false), value, this.top) : label(value);
  }
}

/** What queries take in beside the keys, such as entries of a store. */
export class Lookup {
  readonly weights: Tensor;
  readonly places: number;
  private readonly width: number;
  private readonly entries: Tensor | null;
  private readonly rows: Tensor | null;
  private readonly tokens: Tensor | null;

  constructor(readonly header: LookupHeader, private readonly stored: string[], private readonly keys: string[], buffers: Buffers) {
    this.weights = buffers.read(header.weights);
    [, this.places, this.width] = header.weights.shape as [number, number, number];
    this.entries = buffers.maybe(header.entries);
    this.rows = buffers.maybe(header.rows);
    this.tokens = buffers.maybe(header.tokens);
  }

  /** Whether its places are few enough to be a picture, and not the queries themselves. */
  get isTable(): boolean {
    return this.entries === null;
  }

  /** The places that a query reads. */
  placesOf(query: number): number[] {
    if (this.rows === null) return Array.from({ length: this.places }, (_, place) => place);
    const place = this.rows.of(query);
    return place < 0 ? [] : [place];
  }

  weight(head: number, place: number, at: number): number {
    return this.weights.of((head * this.places + place) * this.width + at);
  }

  /** What is taken in a place, the greatest weight first. */
  taken(head: number, place: number): Link[] {
    const start = (head * this.places + place) * this.width;
    const links = Array.from({ length: this.width }, (_, i) => ({ key: this.entries?.of(start + i) ?? i, weight: this.weights.of(start + i) }));
    return links.filter(({ weight }) => weight > 0).sort((a, b) => b.weight - a.weight || a.key - b.key);
  }

  /** The tokens of an entry. */
  said(entry: number): string {
    if (this.tokens !== null) return joined(this.keys, this.tokens, entry);
    return this.stored[this.stored.length - this.header.count + entry] ?? "";
  }

  /** Their numbers; of entries of a store there are none. */
  range(entry: number): string {
    return this.tokens === null ? "" : between(this.tokens, entry);
  }
}

/** The tokens start <= j < stop of row `at` of a table [N, 2], as text. */
function joined(tokens: string[], table: Tensor, at: number): string {
  return tokens.slice(table.of(2 * at), table.of(2 * at + 1)).map((token) => token.trim() || token).join(" ");
}

function between(table: Tensor, at: number): string {
  const [start, stop] = [table.of(2 * at), table.of(2 * at + 1)];
  return stop - start > 1 ? `${start}–${stop - 1}` : stop > start ? String(start) : "none";
}

export interface Link {
  key: number;
  weight: number;
}

/** One call of attention. */
export class Site {
  readonly queries: string[];
  readonly keys: string[];
  readonly keyCount: number;
  readonly thumbnails: Tensor;
  readonly distance: Tensor | null;
  readonly marks: Mark[];
  readonly lookups: Lookup[];
  private readonly slots: Tensor | null;
  private readonly before: string[];
  readonly weights: Weights | null;
  readonly allowed: Allowed;
  readonly signed: boolean;

  constructor(readonly header: SiteHeader, run: RunHeader, buffers: Buffers) {
    this.queries = run.tokens[header.queries] ?? [];
    this.keys = run.tokens[header.keys] ?? [];
    this.thumbnails = buffers.read(header.thumbnails);
    this.distance = buffers.maybe(header.distance);
    const detail = header.detail;
    this.keyCount = header.slots?.shape[0] ?? keysOf(header, this.keys.length);
    this.allowed = allowedOf(header, this.keyCount, buffers);
    if (detail === null) this.weights = null;
    else this.weights = detail.kind === "pairs" ? new PairWeights(header, detail, this.allowed, buffers) : new StoredWeights(detail, buffers);
    this.signed = detail?.kind === "weights" && detail.values.dtype !== "uint8" && this.negative();
    this.before = run.before;
    this.slots = buffers.maybe(header.slots);
    this.lookups = header.lookups.map((lookup) => new Lookup(lookup, run.stored, this.keys, buffers));
    this.marks = header.marks.map((mark) => new Mark(mark, buffers));
  }

  get queryCount(): number {
    return this.weights?.queries ?? this.queries.length;
  }

  get pairs(): PairWeights | null {
    return this.weights instanceof PairWeights ? this.weights : null;
  }

  /** What a key is called: it may stand for several tokens. */
  keyName(key: number): string {
    return this.slots === null ? `key ${this.position(key)}` : `slot ${key}, tokens ${between(this.slots, key)},`;
  }

  /** What keys are called together. */
  get kindOfKeys(): string {
    return this.slots === null ? "key" : "slot";
  }

  /** What each token gets of a query; of a slot each of its tokens the same share. */
  shares(head: number, query: number): Map<number, number> {
    const shares = new Map<number, number>();
    for (const { key, weight } of this.row(head, query)) {
      const [start, stop] = this.slots === null ? [this.position(key), this.position(key) + 1] : [this.slots.of(2 * key), this.slots.of(2 * key + 1)];
      for (let token = start; token < stop; token++) shares.set(token, (shares.get(token) ?? 0) + weight / (stop - start));
    }
    return shares;
  }

  /** The token of a key; of a memory slot its number; the tokens that a slot stands for. */
  keyToken(key: number): string {
    if (this.slots !== null) return joined(this.keys, this.slots, key);
    const token = key - this.header.memory;
    return token < 0 ? (this.before[this.before.length + token] ?? `[memory ${key}]`) : (this.keys[token] ?? "");
  }

  /** What a mark says of a query, or of a key; null where it says nothing. */
  markOfQuery(mark: Mark, head: number, query: number): number | null {
    return mark.header.of === "keys" ? null : mark.at(head, query);
  }

  markOfKey(mark: Mark, head: number, key: number): number | null {
    if (mark.header.of === "keys") return mark.at(head, key);
    return mark.header.of === "tokens" && this.header.kind === "self" && this.slots === null ? mark.at(head, this.position(key)) : null;
  }

  queryToken(query: number): string {
    return this.queries[query] ?? "";
  }

  /** A key's position in the text; negative in the memory. */
  position(key: number): number {
    return key - this.header.memory;
  }

  weight(head: number, query: number, key: number): number {
    if (this.weights === null || !this.isAllowed(head, query, key)) return 0;
    const out = new Float32Array(1);
    this.weights.fill(head, query, key, key + 1, out);
    return out[0]!;
  }

  isAllowed(head: number, query: number, key: number): boolean {
    return contains(this.allowed.spans(head, query), key);
  }

  /** Every key that the query sees, with its weight. */
  row(head: number, query: number): Link[] {
    const links: Link[] = [];
    if (this.weights === null) return links;
    const spans = this.allowed.spans(head, query);
    for (let at = 0; at < spans.length; at += 2) {
      const out = new Float32Array(spans[at + 1]! - spans[at]!);
      this.weights.fill(head, query, spans[at]!, spans[at + 1]!, out);
      out.forEach((weight, i) => links.push({ key: spans[at]! + i, weight }));
    }
    return links;
  }

  /** The keys of greatest weight, greatest first. */
  top(head: number, query: number, count: number): Link[] {
    const links = this.row(head, query);
    return links.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight) || a.key - b.key).slice(0, count);
  }

  /** A scale that shows the head: the greatest weight of most cells of its thumbnail, rounded up. */
  scale(head: number): number {
    const [, rows, columns] = this.thumbnails.shape as [number, number, number];
    const cells = this.thumbnails.slice(head * rows * columns, rows * columns).filter((cell) => cell > 0).sort();
    const typical = cells.length ? (cells[Math.floor(0.97 * (cells.length - 1))]! / 255) ** 2 : 1;
    return SCALES.find((scale) => scale >= 0.8 * typical) ?? 1;
  }

  private negative(): boolean {
    const weights = this.weights as StoredWeights;
    const out = new Float32Array(weights.keys);
    for (let query = 0; query < Math.min(weights.queries, 64); query++) {
      weights.fill(0, query, 0, weights.keys, out);
      if (out.some((weight) => weight < 0)) return true;
    }
    return false;
  }
}

/** What the last colour of a picture may stand for. */
export const SCALES = [0.003, 0.01, 0.03, 0.1, 0.3, 1];

/** How many keys a call has: those of its detail, and else the tokens and the memory. */
function keysOf({ detail, memory }: SiteHeader, tokens: number): number {
  if (detail === null) return tokens + memory;
  return (detail.kind === "pairs" ? detail.k.shape[1] : detail.values.shape[2])!;
}

/** What each head does for the probability of each token. */
export class Effects {
  readonly layers: number;
  readonly heads: number;
  /** The number of the last token. */
  readonly tokens: number;
  private readonly losses: Tensor;
  private readonly rises: Tensor;

  constructor(header: EffectsHeader, buffers: Buffers) {
    [this.layers, this.heads, this.tokens] = header.rises.shape as [number, number, number];
    this.losses = buffers.read(header.losses);
    this.rises = buffers.read(header.rises);
  }

  probability(token: number): number {
    return Math.exp(-this.losses.of(token - 1));
  }

  /** How much the loss of the token rises without the head. */
  rise(layer: number, head: number, token: number): number {
    return this.rises.of((layer * this.heads + head) * this.tokens + token - 1);
  }

  without(layer: number, head: number, token: number): number {
    return this.probability(token) * Math.exp(-this.rise(layer, head, token));
  }
}

export interface Run {
  header: RunHeader;
  sites: Site[];
  effects: Effects | null;
}

/** Names of the kinds of calls that a run has, such as "decoder self", in their order. */
export function parts(run: Run): string[] {
  return [...new Set(run.sites.map((site) => part(site)))];
}

export function part(site: Site): string {
  return `${site.header.stack}-${site.header.kind}`;
}

/** The sites of a part, by layer. */
export function layers(run: Run, name: string): Site[] {
  return run.sites.filter((site) => part(site) === name).sort((a, b) => a.header.layer - b.header.layer);
}

export function decoded(header: Header, buffers: Buffers): Run[] {
  return header.runs.map((run) => ({
    header: run,
    sites: run.sites.map((site) => new Site(site, run, buffers)),
    effects: run.effects ? new Effects(run.effects, buffers) : null,
  }));
}
