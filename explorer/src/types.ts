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
  bias: Reference | null;
  by_query: Reference | null;
  by_key: Reference | null;
  first: number;
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

export interface MarkHeader {
  name: string;
  values: Reference;
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
}

export interface RunHeader {
  name: string;
  model: string;
  tokens: Record<string, string[]>;
  prompt: number | null;
  pixels: PixelsHeader | null;
  sites: SiteHeader[];
  notes: string[];
}

export interface Header {
  version: number;
  title: string;
  subtitle: string;
  runs: RunHeader[];
}
