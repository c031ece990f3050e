/** Colours of numbers. Lightness alone orders them, so that they are read without seeing hues. */

import { color } from "./dom";

export type Rgb = [number, number, number];

/** Stops of even steps from 0 to 1; the dark page takes the same in reverse. */
const SEQUENTIAL = ["f3faf4", "c9ebd3", "8ad3b0", "45b4ae", "3591a8", "376b9d", "3f448a", "38245c", "1b0f26"];
const DIVERGING_LIGHT = ["1d3f7c", "3f78b5", "93b9dc", "f6f6f4", "eeb48a", "c9692f", "7f3208"];
const DIVERGING_DARK = ["9cc9f5", "5b93cf", "2f537c", "20252c", "7d4a28", "d0803f", "ffc793"];
const LABELS = ["0072b2", "e69f00", "009e73", "cc79a7", "56b4e9", "d55e00", "8c7ae6", "b3a200", "7a5c3d", "6b7785"];

const STEPS = 256;

/** A table of 256 colours and what it is for. */
export interface Palette {
  colors: Uint8ClampedArray;
  signed: boolean;
}

export function dark(): boolean {
  return color("theme") === "dark";
}

export function palette(signed: boolean): Palette {
  const stops = signed ? (dark() ? DIVERGING_DARK : DIVERGING_LIGHT) : dark() ? [...SEQUENTIAL].reverse() : SEQUENTIAL;
  const colors = new Uint8ClampedArray(3 * STEPS);
  const rgb = stops.map(parsed);
  for (let step = 0; step < STEPS; step++) {
    const at = (step / (STEPS - 1)) * (rgb.length - 1);
    const low = Math.min(Math.floor(at), rgb.length - 2);
    for (let c = 0; c < 3; c++) colors[3 * step + c] = rgb[low]![c]! + (at - low) * (rgb[low + 1]![c]! - rgb[low]![c]!);
  }
  return { colors, signed };
}

/** The entry of a weight: by the square root, so that small weights are seen; `top` is the last colour. */
export function entry(weight: number, top: number, signed: boolean): number {
  const share = Math.sqrt(Math.min(1, Math.abs(weight) / top));
  const at = signed ? 0.5 + (weight < 0 ? -0.5 : 0.5) * share : share;
  return Math.round(at * (STEPS - 1));
}

export function css({ colors, signed }: Palette, weight: number, top: number): string {
  const at = 3 * entry(weight, top, signed);
  return `rgb(${colors[at]}, ${colors[at + 1]}, ${colors[at + 2]})`;
}

/** Black or white, whichever is read on the colour of the weight. */
export function ink({ colors, signed }: Palette, weight: number, top: number): string {
  const at = 3 * entry(weight, top, signed);
  return 0.3 * colors[at]! + 0.59 * colors[at + 1]! + 0.11 * colors[at + 2]! > 140 ? "#10151b" : "#ffffff";
}

/** The colour of a bucket, cluster, expert or exit. */
export function label(value: number): string {
  if (value < 0) return "transparent";
  const [r, g, b] = parsed(LABELS[value % LABELS.length]!);
  const shade = 1 - 0.22 * (Math.floor(value / LABELS.length) % 4);
  return `rgb(${r * shade}, ${g * shade}, ${b * shade})`;
}

function parsed(hex: string): Rgb {
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)) as Rgb;
}
