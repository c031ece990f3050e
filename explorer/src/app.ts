/** Holds the state and the chosen view; every change goes through `set`. */

import { el } from "./dom";
import { layers, parts, type Run, type Site } from "./model";
import { saveBar } from "./savebar";
import { fromHash, type State, toHash } from "./state";
import type { Header } from "./types";

export interface View {
  id: string;
  title: string;
  about: string;
  /** Whether the page has anything to show in it. */
  fits(app: App): boolean;
  /** Builds the view; what it gives is called on every change of the state. */
  build(app: App, root: HTMLElement): (changed: Set<keyof State>) => void;
}

export class App {
  state: State = {
    view: "overview", run: 0, part: "", layer: 0, head: 0, query: 0, key: -1,
    zoom: 0, scale: 0, heads: "", overlay: 0, run2: 0, layer2: -1, head2: -1,
  };
  readonly views: View[];
  private update: (changed: Set<keyof State>) => void = () => {};
  private readonly listeners: (() => void)[] = [];
  private leaving: (() => void)[] = [];

  constructor(readonly header: Header, readonly runs: Run[], views: View[], private readonly panel: HTMLElement) {
    this.state.part = parts(this.run)[0] ?? "";
    this.state.query = this.defaultQuery();
    this.views = views.filter((view) => view.fits(this));
    if (runs.some((run) => run.header.pixels !== null)) this.state.view = "picture";
    this.state = this.legal({ ...this.state, ...fromHash(location.hash) });
    window.addEventListener("popstate", () => this.apply(fromHash(location.hash)));
  }

  get run(): Run {
    return this.runs[this.state.run]!;
  }

  get layers(): Site[] {
    return layers(this.run, this.state.part);
  }

  get site(): Site {
    return this.siteOf(this.state.run, this.state.layer);
  }

  /** The site of the chosen part in a run's layer, or the nearest there is. */
  siteOf(run: number, layer: number): Site {
    const sites = layers(this.runs[run]!, this.state.part);
    const all = sites.length ? sites : this.runs[run]!.sites;
    return all.find((site) => site.header.layer === layer) ?? all[Math.min(Math.max(layer, 0), all.length - 1)]!;
  }

  /** Changes the state; `quietly` adds no step to go back to. */
  set(change: Partial<State>, quietly = false): void {
    this.apply(change);
    try {
      history[quietly ? "replaceState" : "pushState"](null, "", toHash(this.state));
    } catch {
      // A page inside a notebook has no address of its own.
    }
  }

  /** Called after every change, views aside. */
  onChange(listener: () => void): void {
    this.listeners.push(listener);
  }

  /** Called when the current view is left. */
  onLeave(action: () => void): void {
    this.leaving.push(action);
  }

  /** Builds the chosen view anew. */
  show(): void {
    this.leaving.forEach((action) => action());
    this.leaving = [];
    const view = this.views.find((candidate) => candidate.id === this.state.view) ?? this.views[0]!;
    this.panel.replaceChildren(el("h2", {}, view.title), el("p", { class: "about" }, view.about));
    this.panel.setAttribute("aria-labelledby", `tab-${view.id}`);
    const { root, update } = saveBar(this, view, this.panel);
    const redraw = view.build(this, this.panel);
    this.panel.append(root); // last, so that the keyboard reaches the view first
    this.update = (changed) => {
      redraw(changed);
      update();
    };
    update();
    this.listeners.forEach((listener) => listener());
  }

  private apply(change: Partial<State>): void {
    const before = this.state;
    this.state = this.legal({ ...before, ...change });
    const changed = new Set((Object.keys(before) as (keyof State)[]).filter((name) => before[name] !== this.state[name]));
    if (changed.has("view")) this.show();
    else if (changed.size > 0) {
      this.update(changed);
      this.listeners.forEach((listener) => listener());
    }
  }

  /** The nearest state that the data has. */
  private legal(state: State): State {
    const within = (value: number, count: number) => Math.min(Math.max(Math.round(value) || 0, 0), Math.max(count - 1, 0));
    const next = { ...state };
    next.run = within(next.run, this.runs.length);
    next.run2 = within(next.run2, this.runs.length);
    next.overlay = within(next.overlay, 2);
    const run = this.runs[next.run]!;
    if (!parts(run).includes(next.part)) next.part = parts(run)[0] ?? "";
    if (next.view === "steps" && !next.part.startsWith("decoder")) {
      next.part = parts(run).find((name) => name.startsWith("decoder")) ?? next.part; // what wrote the tokens
    }
    const sites = layers(run, next.part);
    const site = sites.find((candidate) => candidate.header.layer === next.layer) ?? sites[within(next.layer, sites.length)]!;
    next.layer = site.header.layer;
    next.head = within(next.head, site.header.heads);
    next.query = within(next.query, site.queryCount);
    next.key = next.key < 0 ? -1 : within(next.key, site.keyCount);
    if (!this.views.some((view) => view.id === next.view)) next.view = "overview";
    return next;
  }

  private defaultQuery(): number {
    const site = this.site;
    return site.queryCount <= 64 ? site.queryCount - 1 : Math.floor(site.queryCount / 2);
  }
}
