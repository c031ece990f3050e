/** Ticks: round numbers, never closer than they can be read. */

/** 1, 2 or 5 times a power of ten, at least `least`. */
export function step(least: number): number {
  let power = 1;
  for (;;) {
    for (const factor of [1, 2, 5]) if (factor * power >= least) return factor * power;
    power *= 10;
  }
}

/** A number in few digits. */
export function figure(value: number, digits = 3): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size === Infinity) return value < 0 ? "−∞" : "∞";
  if (size < 1e-4 || size >= 1e6) return value.toExponential(1).replace("-", "−").replace("e+", "e");
  return value.toFixed(Math.max(0, digits - Math.max(0, Math.floor(Math.log10(size))))).replace("-", "−");
}

/** Round steps from `low` to `high`, about `count` of them. */
export function ticks(low: number, high: number, count: number): number[] {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999)!;
  const out: number[] = [];
  for (let at = Math.ceil(low / by - 1e-9) * by; at <= high + by * 1e-6; at += by) out.push(Math.abs(at) < by * 1e-9 ? 0 : at);
  return out;
}

/** A round number without zeros that say nothing. */
export function round(value: number): string {
  return String(Number(value.toPrecision(4))).replace("-", "−");
}
