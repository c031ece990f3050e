/** Light or dark: as the system says, until the button is pressed. */

import { el } from "./dom";

export function themeButton(changed: () => void): HTMLElement {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const button = el("button", { type: "button", class: "theme", click: () => set(root.dataset.theme === "dark" ? "light" : "dark") });
  const set = (theme: string) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light page" : "Dark page";
    changed();
  };
  set(system.matches ? "dark" : "light");
  system.addEventListener("change", () => set(system.matches ? "dark" : "light"));
  return button;
}
