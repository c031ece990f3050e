/** What the recorder wrote: the header of a page, whose references point into its bytes. */

export type Dtype = "uint8" | "int8" | "int16" | "int32" | "float16" | "float32";

export interface Reference {
  at: number;
  dtype: Dtype;
  shape: number[];
}

/** Queries and keys: weight = exp(q.k scale + position terms - lse). */
export interface PairsHeader {
  kind: "pairs";
  q: Reference;
  q_scales: Reference | null;
  k: Reference;
  k_scales: Reference | null;
  scale: number;
  lse: Reference;
  /** Tables over the distances first, first + 1, ...: biases [H or 1, R], and vectors that queries (or content) and keys meet. */
  bias: Reference | null;
  position_keys?: Reference;
  position_keys_scales?: Reference | null;
  content?: Reference;
  content_scales?: Reference | null;
  position_queries?: Reference;
  position_queries_scales?: Reference | null;
  first: number;
  /** Queries that read keys by projections of their own. */
  projected: Reference | null;
  projected_k?: Reference;
  projected_k_scales?: Reference | null;
  changes: ChangeHeader[];
}

/** What a function of scores adds to those of the queries `rows` (null: all): of allowed pairs, head by head, in order. */
export interface ChangeHeader {
  name: string;
  rows: Reference | null;
  values: Reference;
}

/** The matrix that takes values to outputs, of a mechanism that is no softmax of pairs. */
export interface WeightsHeader {
  kind: "weights";
  values: Reference;
}

export interface AllowedHeader {
  offsets: Reference;
  starts: Reference;
  stops: Reference;
}

/** A number for each token: a label as int16, -1 for none, or an amount as float32. */
export interface MarkHeader {
  name: string;
  of: "tokens" | "queries" | "keys";
  /** What labels are called; by default their numbers. */
  names: string[];
  values: Reference;
}

/** What queries take in beside the keys: weights [H, R, K] of `entries` [H, R, K] (null: all, in order) out of `count`. */
export interface LookupHeader {
  name: string;
  count: number;
  weights: Reference;
  entries: Reference | null;
  /** The row that each query reads, -1 for none; null where each reads all. */
  rows: Reference | null;
  /** Tokens start <= j < stop of each entry; null where entries are of the store. */
  tokens: Reference | null;
}

export interface SiteHeader {
  name: string;
  stack: string;
  kind: "self" | "cross";
  layer: number;
  mechanism: string;
  pattern: string | null;
  heads: number;
  queries: string;
  keys: string;
  thumbnails: Reference;
  distance: Reference | null;
  distance_edges: number[];
  allowed: AllowedHeader[] | null;
  allowed_of_head?: number[];
  detail: PairsHeader | WeightsHeader | null;
  marks: MarkHeader[];
  memory: number;
  /** [S, 2]: keys that are no tokens stand for the tokens start <= j < stop. */
  slots: Reference | null;
  lookups: LookupHeader[];
}

export interface PixelsHeader {
  height: number;
  width: number;
  channels: number;
  data: Reference;
  patch: [number, number];
  /** Tokens before the first patch. */
  first: number;
  /** Of each patch: 3 where each colour of a pixel is a token. */
  tokens: number;
  /** Sizes of the patches of stacks that have others. */
  patches: Record<string, [number, number]>;
}

/** Losses [T - 1] of the tokens after the first, and their rises [layers, H, T - 1] without each head. */
export interface EffectsHeader {
  losses: Reference;
  rises: Reference;
}

/** What a classifier of images predicts: its most probable labels, and the right label if it is known. */
export interface PredictionHeader {
  labels: { name: string; probability: number }[];
  label: string;
}

export interface RunHeader {
  name: string;
  model: string;
  tokens: Record<string, string[]>;
  prompt: number | null;
  pixels: PixelsHeader | null;
  prediction?: PredictionHeader | null;
  /** What stands in each slot of the memory that was read. */
  before: string[];
  /** What has entered the store of the memory, in order. */
  stored: string[];
  sites: SiteHeader[];
  effects?: EffectsHeader;
  notes: string[];
}

export interface Header {
  version: number;
  title: string;
  subtitle: string;
  runs: RunHeader[];
}
