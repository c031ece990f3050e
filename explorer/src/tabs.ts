/** The views' tabs: arrow keys go through them, digits open them from anywhere. */

import type { App } from "./app";
import { el } from "./dom";

export function tabs(app: App): { root: HTMLElement; update(): void } {
  const buttons = app.views.map((view, i) => el("button", {
    type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": "panel", title: `Key ${i + 1}`, click: () => app.set({ view: view.id }),
  }, view.title));
  const root = el("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, ...buttons);
  const update = () => app.views.forEach((view, i) => {
    const chosen = view.id === app.state.view;
    buttons[i]!.setAttribute("aria-selected", String(chosen));
    buttons[i]!.tabIndex = chosen ? 0 : -1;
  });
  const open = (number: number) => {
    const view = app.views[(number + app.views.length) % app.views.length]!;
    app.set({ view: view.id });
    buttons[app.views.indexOf(view)]!.focus();
  };
  root.addEventListener("keydown", (event) => {
    const at = app.views.findIndex((view) => view.id === app.state.view);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: app.views.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(to);
  });
  document.addEventListener("keydown", (event) => {
    const field = event.target instanceof Element && event.target.closest("input, select");
    if (field || event.ctrlKey || event.metaKey || event.altKey) return;
    const number = Number(event.key);
    if (number >= 1 && number <= app.views.length) open(number - 1);
    const { layer, head } = app.state;
    if (event.key === "[" || event.key === "]") app.set({ layer: layer + (event.key === "]" ? 1 : -1) });
    if (event.key === "," || event.key === ".") app.set({ head: head + (event.key === "." ? 1 : -1) });
  });
  return { root, update };
}
