/** Saving a picture as a file: SVG as it is drawn, with the colours of the page written into it; anything else as PNG. */

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "shape-rendering",
];
const NO_XML = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu; // what an XML file may not hold

/** A button that saves what `find` gives when it is pressed, in a file of that name. */
export function saveButton(text: string, name: string, find: () => Element | null): HTMLButtonElement {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "save";
  button.textContent = text;
  button.addEventListener("click", (event) => {
    event.preventDefault();
    const element = find();
    if (element) void save(element, name);
  });
  return button;
}

/** The kind of file that an element is saved as. */
export function kindOf(element: Element): "SVG" | "PNG" {
  return element instanceof SVGSVGElement ? "SVG" : "PNG";
}

/** Saves an SVG, a canvas, an image, or everything drawn inside an element. */
export async function save(element: Element, name: string): Promise<void> {
  const kind = kindOf(element);
  const content = kind === "SVG" ? svgFile(element as SVGSVGElement) : await pngFile(element);
  const address = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = address;
  link.download = `${fileName(name)}.${kind.toLowerCase()}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** A name without what file systems refuse. */
function fileName(text: string): string {
  return text.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 80) || "picture";
}

function paper(): string {
  return getComputedStyle(document.body).backgroundColor;
}

function svgFile(picture: SVGSVGElement): Blob {
  const copy = picture.cloneNode(true) as SVGSVGElement;
  const drawn = picture.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((element, i) => {
    element.removeAttribute("tabindex");
    if (["g", "title", "desc"].includes(element.localName)) return;
    const style = getComputedStyle(drawn[i]!);
    for (const name of STYLES) element.setAttribute(name, style.getPropertyValue(name));
  });
  const own = picture.viewBox.baseVal;
  const box = own?.width ? own : { x: 0, y: 0, ...sizeOf(picture) };
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const place = { x: box.x, y: box.y, width: box.width, height: box.height, fill: paper() };
  for (const [name, value] of Object.entries(place)) ground.setAttribute(name, String(value));
  copy.prepend(ground);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", `${box.x} ${box.y} ${box.width} ${box.height}`);
  copy.setAttribute("width", String(box.width));
  copy.setAttribute("height", String(box.height));
  return new Blob([new XMLSerializer().serializeToString(copy).replace(NO_XML, "\ufffd")], { type: "image/svg+xml" });
}

function sizeOf(element: Element): { width: number; height: number } {
  const { width, height } = element.getBoundingClientRect();
  return { width: Math.max(1, width), height: Math.max(1, height) };
}

/** The pixels of a canvas or an image, or all of those inside an element with the words between them. */
async function pngFile(element: Element): Promise<Blob> {
  const ratio = window.devicePixelRatio || 1;
  const { width, height } = sizeOf(element);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d")!;
  pen.scale(ratio, ratio);
  pen.fillStyle = paper();
  pen.fillRect(0, 0, width, height);
  const pictures = element.matches("canvas, img") ? [element] : [...element.querySelectorAll("canvas, img")];
  for (const picture of pictures) draw(pen, picture as HTMLCanvasElement | HTMLImageElement, element);
  if (!element.matches("canvas, img")) write(pen, element);
  return new Promise((resolve, reject) =>
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the picture is too large"))), "image/png"));
}

function draw(pen: CanvasRenderingContext2D, picture: HTMLCanvasElement | HTMLImageElement, root: Element): void {
  const [box, corner] = [picture.getBoundingClientRect(), root.getBoundingClientRect()];
  if (!picture.width || !picture.height) return;
  pen.imageSmoothingEnabled = getComputedStyle(picture).imageRendering !== "pixelated";
  pen.drawImage(picture, box.left - corner.left, box.top - corner.top, box.width, box.height);
}

/** Words where the page shows them. */
function write(pen: CanvasRenderingContext2D, root: Element): void {
  const corner = root.getBoundingClientRect();
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  pen.textBaseline = "middle";
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    const style = getComputedStyle(text.parentElement!);
    pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    pen.fillStyle = style.color;
    pen.fillText(text.textContent ?? "", box.left - corner.left, box.top - corner.top + box.height / 2);
  }
}
