/** What a token looks like: nothing in it acts, and nothing in it stays invisible. */

import { el } from "./dom";

const NAMED: Record<number, string> = { 9: "⇥", 10: "↵", 13: "␍", 32: "␣", 127: "␡" };
/** Direction, joining, invisible and private characters, and halves of pairs: shown by their numbers. */
const HIDDEN = /[\u0080-\u00a0\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffc\u{e0000}-\u{e0fff}]/u;
const COMBINING = /^\p{M}/u;

/** The token with visible signs for what has none. */
export function visible(token: string): string {
  if (token === "") return "∅";
  let text = COMBINING.test(token) ? "◌" : "";
  const inner = token.length > 1 && token.trim() !== "";
  for (const character of token) {
    const code = character.codePointAt(0)!;
    if (code === 32) text += inner && text !== "" ? " " : "␣";
    else if (NAMED[code] !== undefined) text += NAMED[code];
    else if (code < 32) text += String.fromCodePoint(0x2400 + code);
    else if (HIDDEN.test(character)) text += `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
    else text += character;
  }
  return text;
}

/** At most `length` characters of what is visible. */
export function short(token: string, length = 18): string {
  const characters = [...visible(token.slice(0, 4 * length))];
  const cut = characters.length > length || token.length > 4 * length;
  return cut ? characters.slice(0, length - 1).join("") + "…" : characters.join("");
}

/** For canvas and attributes, where no <bdi> stands: between isolates. */
export function isolated(token: string, length = 18): string {
  return `\u2068${short(token, length)}\u2069`;
}

export function bdi(token: string, length = 18): HTMLElement {
  const cut = short(token, length);
  const whole = visible(token.slice(0, 400));
  return el("bdi", { class: "token", title: cut === whole ? null : whole }, cut);
}
