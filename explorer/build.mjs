// Bundles the page's script and style into the Python package, and writes down what they were made of.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const out = join(here, "..", "src", "polyformer", "cli", "plots", "explorer");
const sources = ["build.mjs", "package-lock.json", "package.json", "src", "tsconfig.json"];
const outputs = ["explorer.css", "explorer.js", "figures.js"];

const files = (path) =>
  path.includes(".") ? [path] : readdirSync(path, { withFileTypes: true })
    .flatMap((entry) => entry.isDirectory() ? files(join(path, entry.name)) : [join(path, entry.name)]);

/** sha256 of the files' paths and contents, in the order of their paths. */
function digest(paths) {
  const hash = createHash("sha256");
  for (const path of [...paths].sort()) {
    hash.update(path).update("\0").update(readFileSync(join(here, path))).update("\0");
  }
  return hash.digest("hex");
}

process.chdir(here);
await build({
  entryPoints: { explorer: "src/main.ts", figures: "src/figures.ts" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "ascii",
  legalComments: "none",
});
await build({ entryPoints: ["src/explorer.css"], outdir: out, minify: true, target: "chrome110", charset: "utf8" });
const lock = { sources: digest(sources.flatMap(files).map((path) => relative(here, join(here, path)).split(sep).join("/"))) };
for (const name of outputs) {
  const content = readFileSync(join(out, name));
  if (/<\/script|<!--|<\/style/i.test(content.toString())) throw new Error(`${name} would end its own element`);
  lock[name] = createHash("sha256").update(content).digest("hex");
}
writeFileSync(join(out, "explorer.lock.json"), JSON.stringify(lock, null, 2) + "\n");
