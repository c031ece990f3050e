/** Typed arrays out of the page's base64, without a copy for any type that JavaScript has. */

import type { Reference } from "./types";

export type Numbers = Uint8Array | Int8Array | Int16Array | Int32Array | Uint16Array | Float32Array;

/** An array and how its numbers are read: `of(index)`. */
export class Tensor {
  constructor(readonly data: Numbers, readonly shape: number[], private readonly half: boolean) {}

  of(index: number): number {
    const value = this.data[index]!;
    return this.half ? halves()[value]! : value;
  }

  /** `count` numbers from `index` on, as float32. */
  slice(index: number, count: number): Float32Array {
    const out = new Float32Array(count);
    for (let i = 0; i < count; i++) out[i] = this.of(index + i);
    return out;
  }
}

export class Buffers {
  private readonly bytes: ArrayBuffer;

  constructor(base64: string) {
    const binary = atob(base64.trim());
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    this.bytes = bytes.buffer;
  }

  read(reference: Reference): Tensor {
    const count = reference.shape.reduce((product, size) => product * size, 1);
    return new Tensor(this.view(reference, count), reference.shape, reference.dtype === "float16");
  }

  maybe(reference: Reference | null): Tensor | null {
    return reference === null ? null : this.read(reference);
  }

  private view({ at, dtype }: Reference, count: number): Numbers {
    switch (dtype) {
      case "uint8":
        return new Uint8Array(this.bytes, at, count);
      case "int8":
        return new Int8Array(this.bytes, at, count);
      case "int16":
        return new Int16Array(this.bytes, at, count);
      case "int32":
        return new Int32Array(this.bytes, at, count);
      case "float16":
        return new Uint16Array(this.bytes, at, count);
      case "float32":
        return new Float32Array(this.bytes, at, count);
    }
  }
}

let table: Float32Array | null = null;

/** The value of each of the 65,536 numbers of IEEE 754 binary16. */
export function halves(): Float32Array {
  if (table === null) {
    table = new Float32Array(1 << 16);
    for (let bits = 0; bits < 1 << 16; bits++) table[bits] = half(bits);
  }
  return table;
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
