/** For pages other than the explorer, such as the report of a run: a button under each figure that saves it. */

import { kindOf, saveButton } from "./save";

const title = document.title;
[...document.querySelectorAll("figure, [data-save]")].forEach((figure, i) => {
  const picture = figure.matches("[data-save]") ? figure : figure.querySelector("svg, canvas, img");
  if (!picture) return;
  const name = picture.getAttribute("data-save") ?? picture.getAttribute("alt") ?? figure.closest("section")?.querySelector("h2")?.textContent ?? "";
  const button = saveButton(`Save ${kindOf(picture)}`, `${title} ${name} ${i + 1}`, () => picture);
  if (figure === picture) figure.after(button);
  else figure.append(button);
});
