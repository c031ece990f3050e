/** The buttons below a view that save its pictures: what carries `data-save`, by that name. */

import type { App, View } from "./app";
import { el } from "./dom";
import { kindOf, saveButton } from "./save";

export function saveBar(app: App, view: View, panel: HTMLElement): { root: HTMLElement; update(): void } {
  const root = el("div", { class: "buttons saving", role: "group", "aria-label": "Save pictures" });
  let shown = "";
  const update = () => {
    const pictures = [...panel.querySelectorAll("[data-save]")].filter((picture) => !picture.closest("[hidden]"));
    const names = pictures.map((picture) => picture.getAttribute("data-save")!);
    const content = names.join("\n");
    if (content === shown) return;
    shown = content;
    root.replaceChildren(...pictures.map((picture, i) => {
      const name = names[i]!;
      // A view may have drawn the picture anew by the time the button is pressed.
      const find = () => [...panel.querySelectorAll("[data-save]")].find((each) => each.getAttribute("data-save") === name) ?? null;
      return saveButton(`Save ${name} (${kindOf(picture)})`, `${app.header.title} ${view.id} ${name}`, find);
    }));
  };
  return { root, update };
}
