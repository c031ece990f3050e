/** A token's path down through the layers: attention rollout (Abnar and Zuidema 2020, section 3). */

import type { Site } from "./model";

/** Shares that are not followed further. */
export const LEAST = 1e-5;

/**
 * One layer of r <- r (0.5 A + 0.5 I) with A the mean of the heads, rows normalised. It pauses where it is asked
 * to, so that a page of long texts stays alive.
 */
export async function through(site: Site, shares: Float64Array, pause: () => Promise<boolean>): Promise<Float64Array | null> {
  const out = new Float64Array(shares.length);
  const { heads } = site.header;
  for (let query = 0; query < shares.length; query++) {
    const share = shares[query]!;
    if (share < LEAST) continue;
    const row = new Map<number, number>();
    let total = 0;
    for (let head = 0; head < heads; head++) {
      for (const [token, weight] of site.shares(head, query)) {
        const size = Math.abs(weight); // a matrix of a linear mechanism may have negative entries
        total += size;
        row.set(token, (row.get(token) ?? 0) + size);
      }
    }
    out[query]! += (total > 0 ? 0.5 : 1) * share;
    for (const [token, size] of row) if (token >= 0) out[token]! += (0.5 * share * size) / total;
    if (!(await pause())) return null;
  }
  return normalised(out);
}

function normalised(shares: Float64Array): Float64Array {
  const total = shares.reduce((sum, share) => sum + share, 0);
  return total > 0 ? shares.map((share) => share / total) : shares;
}
