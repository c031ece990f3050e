/** What is being looked at. It stands in the page's address, so that a view can be linked and gone back to. */

export interface State {
  view: string;
  run: number;
  part: string;
  layer: number;
  head: number;
  query: number;
  key: number;
  zoom: number;
  scale: number;
  heads: string;
  /** Of a picture: 1 for weights over it. */
  overlay: number;
  run2: number;
  layer2: number;
  head2: number;
}

/** Layers, heads and runs are counted from 0 here and from 1 in the address, as they are on the page. */
const COUNTED = new Set(["run", "layer", "head", "run2", "layer2", "head2"]);

const SHOWN: Record<string, (keyof State)[]> = {
  matrix: ["key", "zoom", "scale"],
  lines: ["key", "heads"],
  neuron: ["key"],
  picture: ["overlay"],
  compare: ["key", "zoom", "run2", "layer2", "head2"],
};

export function toHash(state: State): string {
  const names: (keyof State)[] = ["view", "run", "part", "layer", "head", "query", ...(SHOWN[state.view] ?? [])];
  const pairs = names
    .filter((name) => state[name] !== "" && state[name] !== -1)
    .map((name) => `${name}=${encodeURIComponent(COUNTED.has(name) ? Number(state[name]) + 1 : state[name])}`);
  return `#${pairs.join("&")}`;
}

/** What the address says; what is not said or makes no sense is left out. */
export function fromHash(hash: string): Partial<State> {
  const state: Record<string, string | number> = {};
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (["view", "part", "heads"].includes(name)) state[name] = value;
    else if (["run", "layer", "head", "query", "key", "zoom", "scale", "overlay", "run2", "layer2", "head2"].includes(name)) {
      const number = Number(value);
      if (Number.isFinite(number)) state[name] = number - (COUNTED.has(name) ? 1 : 0);
    }
  }
  return state as Partial<State>;
}
