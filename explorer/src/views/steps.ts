/** What the model looked at when it wrote each token. */

import type { App, View } from "../app";
import { figure } from "../axes";
import { el } from "../dom";
import { legend } from "../legend";
import { css, ink, palette } from "../palette";
import { topKeys } from "../table";
import { bdi, short } from "../tokens";

const AROUND = 240; // tokens of a text that are written out

export const steps: View = {
  id: "steps",
  title: "Steps",
  about: "A generated token is written by the query before it. Go through the steps with the slider or its arrow keys: the further its colour is along the scale, the more a token was looked at.",
  fits: (app) => app.runs.some((run) => run.header.prompt !== null),
  build(app, root) {
    const slider = el("input", { type: "range", id: "step", "aria-label": "Generated token" });
    const said = el("output", { for: "step" });
    const text = el("div", { class: "text" });
    const side = el("div", { class: "side" });
    const scale = el("div", {});
    root.append(el("div", { class: "tools" }, scale, el("label", { class: "field stepper" }, "Step ", slider, said)),
      el("div", { class: "split" }, text, side));
    slider.addEventListener("input", () => app.set({ query: firstQuery(app) + Number(slider.value) }, true));
    const draw = () => {
      const { prompt } = app.run.header;
      if (prompt === null) return text.replaceChildren(el("p", { class: "note" }, "Nothing was generated in this run."));
      if (app.site.header.stack !== "decoder") return text.replaceChildren(el("p", { class: "note" }, "Choose the attention of the decoder: it wrote the tokens."));
      const first = firstQuery(app);
      const last = app.site.queryCount - 2;
      slider.min = "0";
      slider.max = String(Math.max(0, last - first));
      const query = Math.min(Math.max(app.state.query, first), Math.max(first, last));
      slider.value = String(query - first);
      slider.setAttribute("aria-valuetext", `wrote ${short(app.site.queryToken(query + 1), 40)}`);
      said.replaceChildren(`${query - first + 1} of ${last - first + 1}: wrote `, bdi(app.site.queryToken(query + 1), 30));
      scale.replaceChildren(legend("weight", app.site.scale(app.state.head), app.site.signed, false));
      const tokens = written(app, query);
      text.replaceChildren(...tokens);
      side.replaceChildren(topKeys({ site: app.site, head: app.state.head, query, key: app.state.key, pick: (key) => app.set({ key }) }));
    };
    draw();
    return draw;
  },
};

function firstQuery(app: App): number {
  return Math.max(0, (app.run.header.prompt ?? 1) - 1);
}

/** The text that was read, its background by weight; for the decoder the token that was written last. */
function written(app: App, query: number): (Node | string)[] {
  const { site } = app;
  const top = site.scale(app.state.head);
  const colors = palette(site.signed);
  const weights = site.shares(app.state.head, query);
  const cross = site.header.kind === "cross";
  const best = site.top(app.state.head, query, 1)[0];
  const end = cross ? Math.min(site.keys.length, Math.max(AROUND, (best ? site.position(best.key) : 0) + AROUND / 2)) : query + 1;
  const from = Math.max(0, end - AROUND);
  const prompt = app.run.header.prompt ?? 0;
  const out: Node[] = from > 0 ? [el("span", { class: "soft" }, `… ${from} tokens before … `)] : [];
  for (let token = from; token < end; token++) {
    const weight = weights.get(token) ?? 0;
    const piece = el("bdi", { class: !cross && token >= prompt ? "word generated" : "word", "data-token": token, "data-weight": weight, title: `${token}: weight ${figure(weight)}` }, short(site.keys[token] ?? "", 40));
    piece.style.setProperty("background-color", css(colors, weight, top));
    piece.style.setProperty("color", ink(colors, weight, top));
    out.push(piece);
  }
  if (!cross) out.push(el("bdi", { class: "word next", "data-next": query + 1 }, short(site.queryToken(query + 1), 40)));
  return out;
}
