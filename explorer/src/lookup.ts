/** What queries take in beside the keys: a table of the pinned query, and of few places a picture of all. */

import { figure, step } from "./axes";
import { color, context, el } from "./dom";
import { legend } from "./legend";
import type { Lookup, Site } from "./model";
import { css, palette } from "./palette";
import { bdi } from "./tokens";

const ROWS = 12;

/** Of every lookup of a site. */
export function lookups(site: Site, head: number, query: number): HTMLElement[] {
  return site.lookups.map((lookup) => el("section", { class: "lookup", "data-lookup": lookup.header.name },
    table(lookup, site, head, query), ...(lookup.isTable ? [picture(lookup, head, query), legend("weight", 1, false, false)] : [])));
}

function table(lookup: Lookup, site: Site, head: number, query: number): HTMLElement {
  const places = lookup.placesOf(query);
  const own = places.length === 1;
  const links = places.flatMap((place) => lookup.taken(head, place).map((link) => ({ ...link, place })))
    .sort((a, b) => b.weight - a.weight || a.place - b.place || a.key - b.key);
  const kind = lookup.isTable ? "block" : "entry";
  const caption = el("caption", {}, `Query ${query} `, bdi(site.queryToken(query)),
    lookup.isTable && own ? `, block ${places[0]}: ` : ": ", el("b", {}, lookup.header.name), links.length ? `; ${links.length} of ${lookup.header.count}` : ", nothing");
  const rows = links.slice(0, ROWS).map(({ key, weight, place }) => el("tr", { "data-entry": key, "data-place": place, "data-weight": weight },
    !own && el("td", {}, String(place)), el("td", {}, String(key)), el("td", {}, lookup.isTable && el("span", { class: "range" }, lookup.range(key)), " ", bdi(lookup.said(key), lookup.isTable ? 12 : 16)),
    el("td", { class: "number" }, figure(weight, 4)), el("td", {}, el("meter", { min: 0, max: 1, value: weight, "aria-hidden": "true" }))));
  const names = [...(own || !links.length ? [] : ["place"]), kind, lookup.isTable ? "its tokens" : "token", "weight", ""];
  const head_ = el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name))));
  return el("table", { class: "keys" }, caption, links.length > 0 && head_, el("tbody", {}, ...rows));
}

const [LEFT, BOTTOM, WIDE] = [52, 38, 260];

/** All places of a head, rows, by what is taken there, columns; the pinned query's place has a frame. */
function picture(lookup: Lookup, head: number, query: number): HTMLElement {
  const { places } = lookup;
  const columns = lookup.header.count;
  const cell = Math.max(1, Math.min(24, WIDE / columns));
  const canvas = el("canvas", { class: "places", "data-save": lookup.header.name, role: "img", "aria-label": `${lookup.header.name}: ${places} places by ${columns} blocks; the table lists the pinned query's` });
  const ctx = context(canvas, LEFT + columns * cell + 12, places * cell + BOTTOM);
  const colors = palette(false);
  for (let place = 0; place < places; place++) {
    for (let block = 0; block < columns; block++) {
      ctx.fillStyle = css(colors, lookup.weight(head, place, block), 1);
      ctx.fillRect(LEFT + block * cell, place * cell, cell, cell);
    }
  }
  ctx.strokeStyle = color("accent");
  ctx.lineWidth = 2;
  const own = lookup.placesOf(query);
  if (own.length === 1) ctx.strokeRect(LEFT, own[0]! * cell, columns * cell, cell);
  ctx.fillStyle = color("soft");
  ctx.font = `12px ${color("sans")}`;
  ctx.textBaseline = "middle";
  const every = step(18 / cell);
  ctx.textAlign = "right";
  for (let place = 0; place < places; place += every) ctx.fillText(String(place), LEFT - 6, (place + 0.5) * cell);
  ctx.textAlign = "center";
  for (let block = 0; block < columns; block += every) ctx.fillText(String(block), LEFT + (block + 0.5) * cell, places * cell + 10);
  ctx.fillText("block that is sorted there", LEFT + Math.max(70, (columns * cell) / 2), places * cell + 28);
  ctx.save();
  ctx.translate(10, (places * cell) / 2);
  ctx.rotate(-Math.PI / 2);
  ctx.fillText("place", 0, 0);
  ctx.restore();
  canvas.dataset.ready = "true";
  return canvas;
}
