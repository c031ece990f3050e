/** The keys that a query weighs most, as a table: what the pictures show, for readers and for those who see none. */

import type { App } from "./app";
import { figure } from "./axes";
import { el } from "./dom";
import type { Site } from "./model";
import { bdi } from "./tokens";

const KEYS = 12;

export interface Chosen {
  site: Site;
  head: number;
  query: number;
  key: number;
  pick(key: number): void;
}

export function topKeys({ site, head, query, key, pick }: Chosen, count = KEYS): HTMLElement {
  const links = site.top(head, query, count);
  const seen = seenKeys(site, head, query);
  const caption = el("caption", {}, "Query ", el("b", {}, String(query)), " ", bdi(site.queryToken(query)),
    ` sees ${seen.toLocaleString("en")} ${site.kindOfKeys}${seen === 1 ? "" : "s"}; greatest weights:`);
  const greatest = Math.max(...links.map(({ weight }) => Math.abs(weight)), 1e-30);
  const rows = links.map((link) => {
    const button = el("button", { type: "button", "aria-pressed": link.key === key, click: () => pick(link.key) },
      String(site.position(link.key)));
    if (link.key === key) button.setAttribute("aria-pressed", "true");
    const bar = el("meter", { min: 0, max: greatest, value: Math.abs(link.weight), "aria-hidden": "true" });
    return el("tr", { "data-key": link.key, "data-weight": link.weight }, el("td", {}, button),
      el("td", {}, bdi(site.keyToken(link.key))), el("td", { class: "number" }, figure(link.weight, 4)), el("td", {}, bar));
  });
  const head_ = el("thead", {}, el("tr", {}, ...[site.kindOfKeys, site.kindOfKeys === "key" ? "token" : "its tokens", "weight", ""].map((name) => el("th", { scope: "col" }, name))));
  const table = el("table", { class: "keys" }, caption, head_, el("tbody", {}, ...rows));
  if (site.weights === null) return el("p", { class: "note" }, "Of this layer the page holds thumbnails alone.");
  return table;
}

export function seenKeys(site: Site, head: number, query: number): number {
  const spans = site.allowed.spans(head, query);
  let count = 0;
  for (let at = 0; at < spans.length; at += 2) count += spans[at + 1]! - spans[at]!;
  return count;
}

/** The table of what is pinned now. */
export function pinnedTable(app: App): HTMLElement {
  const { head, query, key } = app.state;
  return topKeys({ site: app.site, head, query, key, pick: (chosen) => app.set({ key: chosen }) });
}
