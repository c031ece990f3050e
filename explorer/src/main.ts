/** Builds the page from the data in it. */

import { App } from "./app";
import { Buffers } from "./buffers";
import { controls } from "./controls";
import { el } from "./dom";
import { decoded } from "./model";
import { tabs } from "./tabs";
import { themeButton } from "./theme";
import type { Header } from "./types";
import { compare } from "./views/compare";
import { distance } from "./views/distance";
import { effects } from "./views/effects";
import { lines } from "./views/lines";
import { matrix } from "./views/matrix";
import { neuron } from "./views/neuron";
import { overview } from "./views/overview";
import { path } from "./views/path";
import { pictureView } from "./views/picture";
import { steps } from "./views/steps";

const KEYS: [string, string][] = [
  ["1 … 9", "open a view"], ["[ ]", "layer up, down"], [", .", "head before, after"], ["Tab", "to the view's parts"],
  ["arrow keys", "in a matrix, picture, overview or list of tokens: move"], ["+ −", "in a matrix: zoom"], ["Home End", "in a matrix: first and last query"], ["Enter", "pin"],
];

function build(): void {
  const header = JSON.parse(document.getElementById("explorer-data")!.textContent!) as Header;
  const store = document.getElementById("explorer-buffers")!;
  const buffers = new Buffers(store.textContent!);
  store.remove(); // its text is in memory twice otherwise
  const panel = el("section", { id: "panel", role: "tabpanel", tabindex: -1 });
  const views = [overview, matrix, lines, neuron, distance, path, steps, effects, compare, pictureView(buffers)];
  const app = new App(header, decoded(header, buffers), views, panel);
  const bar = tabs(app);
  const chosen = controls(app);
  const theme = themeButton(() => panel.isConnected && app.show());
  const names = header.runs.map((run) => el("span", { class: "run" }, el("b", {}, run.name), ` ${run.model}`));
  const help = el("details", { class: "help" }, el("summary", {}, "Keys"),
    el("dl", {}, ...KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])));
  document.getElementById("explorer")!.append(
    el("header", {}, el("div", {}, el("h1", {}, el("bdi", {}, header.title)), el("p", { class: "subtitle" }, el("bdi", {}, header.subtitle)), el("p", { class: "runs" }, ...names)), theme),
    bar.root, chosen.root, el("main", {}, panel), el("footer", {}, help),
  );
  const update = () => {
    bar.update();
    chosen.update();
    chosen.root.classList.toggle("quiet", app.state.view === "overview");
  };
  app.onChange(update);
  app.show();
}

build();
