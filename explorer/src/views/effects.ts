/** How the probability of a token changes without each head. */

import type { App, View } from "../app";
import { figure } from "../axes";
import { el } from "../dom";
import { legend } from "../legend";
import type { Effects } from "../model";
import { css, ink, palette } from "../palette";
import { short } from "../tokens";

const AROUND = 120; // tokens of a text on both sides of the chosen token
const TOP = 3; // the last colour: a loss of 3 nats, a probability 20 times smaller

export const effects: View = {
  id: "effects",
  title: "Effects",
  about: "The probability of a token, with all heads and without each of them: the output of the head is then its mean over the text. Choose a token; a cell opens the matrix of its head.",
  fits: (app) => app.runs.some((run) => run.effects !== null),
  build(app, root) {
    const text = el("div", { class: "text" });
    const said = el("p", { class: "readout" });
    const table = el("div", { class: "wide" });
    root.append(text, said, legend("fall of the log-probability without the head", TOP, true, false), table);
    const draw = () => {
      const { effects: data } = app.run;
      if (data === null) return text.replaceChildren(el("p", { class: "note" }, "The effects of heads were not computed in this run."));
      const token = Math.min(app.state.query + 1, data.tokens);
      const focused = (document.activeElement as HTMLElement | null)?.dataset.effect;
      text.replaceChildren(...words(app, data, token));
      said.replaceChildren("Token ", el("b", {}, String(token)), " ", el("bdi", { class: "token" }, short(nameOf(app, token), 40)),
        " has the probability ", el("b", {}, figure(data.probability(token))), " after the tokens before it.");
      table.replaceChildren(grid(app, data, token));
      if (focused) root.querySelector<HTMLElement>(`[data-effect="${focused}"]`)?.focus();
    };
    draw();
    return draw;
  },
};

function nameOf(app: App, token: number): string {
  return app.run.header.tokens["decoder"]?.[token] ?? "";
}

/** The tokens near the chosen one, as buttons; the first token of a text has no probability. */
function words(app: App, data: Effects, token: number): HTMLElement[] {
  const first = Math.max(1, token - AROUND);
  const count = Math.min(data.tokens, token + AROUND) - first + 1;
  return Array.from({ length: count }, (_, i) => first + i).map((each) =>
    el("button", { type: "button", class: "word", "data-effect": `token-${each}`, "aria-pressed": String(each === token),
      title: `${each}: probability ${figure(data.probability(each))}`, click: () => app.set({ query: each - 1 }) },
      el("bdi", {}, short(nameOf(app, each), 40))));
}

function grid(app: App, data: Effects, token: number): HTMLElement {
  const colors = palette(true);
  const row = (layer: number) => Array.from({ length: data.heads }, (_, head) => {
    const rise = data.rise(layer, head, token);
    const change = `${figure(data.probability(token))} → ${figure(data.without(layer, head, token))}`;
    const button = el("button", { type: "button", "data-effect": `${layer}-${head}`, "data-rise": rise,
      title: `layer ${layer + 1}, head ${head + 1}: ${change}`, "aria-label": `Layer ${layer + 1}, head ${head + 1}: ${change}`,
      click: () => app.set({ layer, head, query: token - 1, key: -1, view: "matrix" }) }, rise.toFixed(2).replace("-0.00", "0.00").replace("-", "−"));
    button.style.setProperty("background-color", css(colors, rise, TOP));
    button.style.setProperty("color", ink(colors, rise, TOP));
    return el("td", {}, button);
  });
  const names = ["layer", ...Array.from({ length: data.heads }, (_, head) => `head ${head + 1}`)];
  return el("table", { class: "effects" },
    el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...Array.from({ length: data.layers }, (_, layer) => el("tr", {}, el("th", { scope: "row" }, String(layer + 1)), ...row(layer)))));
}
