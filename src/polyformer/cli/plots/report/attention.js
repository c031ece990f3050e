// Attention maps: choose a head, then a token; what it attends to is shaded, in the text and in the matrix.
(() => {
  const data = JSON.parse(document.getElementById("attention-data").textContent);
  const { tokens, layers, heads } = data, n = tokens.length;
  const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0));
  const weight = (layer, head, query, key) => bytes[((layer * heads + head) * n + query) * n + key] / 255;
  const grid = document.getElementById("attention-heads"), strip = document.getElementById("attention-tokens");
  const matrix = document.getElementById("attention-matrix"), said = document.getElementById("attention-said");
  let layer = 0, head = 0, query = n - 1;

  const colour = () => {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--c0").trim();
    return [1, 3, 5].map((start) => parseInt(probe.fillStyle.slice(start, start + 2), 16));
  };

  function paint(canvas, layer, head, row) {
    const pen = canvas.getContext("2d"), image = pen.createImageData(n, n), [red, green, blue] = colour();
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
      const faint = row === undefined || row === i ? 1 : 0.45;
      image.data.set([red, green, blue, 255 * faint * Math.sqrt(weight(layer, head, i, j))], 4 * (i * n + j));
    }
    pen.putImageData(image, 0, 0);
  }

  const shown = (text) => JSON.stringify(text);

  function show() {
    [...grid.children].forEach((button, index) => {
      button.setAttribute("aria-pressed", index === layer * heads + head);
    });
    paint(matrix, layer, head, query);
    const rgb = colour().join(" ");
    [...strip.children].forEach((span, key) => {
      span.style.background = `rgb(${rgb} / ${0.85 * Math.sqrt(weight(layer, head, query, key))})`;
      span.setAttribute("aria-selected", key === query);
      span.tabIndex = key === query ? 0 : -1;
    });
    const order = tokens.map((_, key) => key).sort((a, b) => weight(layer, head, query, b) - weight(layer, head, query, a));
    const most = order.slice(0, 3).map((key) => `${shown(tokens[key])} ${Math.round(100 * weight(layer, head, query, key))} %`);
    said.textContent = `Layer ${layer + 1}, head ${head + 1}: ${shown(tokens[query])} (token ${query + 1}) attends to ${most.join(", ")}.`;
  }

  for (let l = 0; l < layers; l++) for (let h = 0; h < heads; h++) {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    canvas.width = canvas.height = n;
    button.type = "button";
    button.append(canvas, `${l + 1}.${h + 1}`);
    button.setAttribute("aria-label", `layer ${l + 1}, head ${h + 1}`);
    button.addEventListener("click", () => { [layer, head] = [l, h]; show(); });
    grid.append(button);
  }
  grid.style.gridTemplateColumns = `repeat(${heads}, max-content)`;

  tokens.forEach((token, key) => {
    const span = document.createElement("span");
    span.textContent = token;
    span.setAttribute("role", "option");
    span.addEventListener("mouseenter", () => { query = key; show(); });
    span.addEventListener("click", () => { query = key; show(); span.focus(); });
    strip.append(span);
  });
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    query = Math.min(n - 1, Math.max(0, query + step));
    show();
    strip.children[query].focus();
    event.preventDefault();
  });
  matrix.width = matrix.height = n;
  matrix.addEventListener("mousemove", (event) => {
    const place = matrix.getBoundingClientRect();
    query = Math.min(n - 1, Math.max(0, Math.floor((n * (event.clientY - place.top)) / place.height)));
    show();
  });

  const all = () => {
    [...grid.children].forEach((button, index) => {
      paint(button.firstChild, Math.floor(index / heads), index % heads);
    });
    show();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
})();
