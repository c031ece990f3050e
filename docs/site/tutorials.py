"""Convert tutorials, scripts with cells (`# %%`, `# %% [markdown]`), to pages with their output.

`python docs/site/tutorials.py` runs the tutorials with changed code (all with `--all`), and records the
output in docs/tutorials/output. A page shows the output of a cell below the cell.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "tutorials"
OUTPUT = FOLDER / "output"


class Cell(NamedTuple):
    """A part of a tutorial: prose without comment signs, or code."""

    prose: bool
    text: str
    line: int


def cells(script: str) -> list[Cell]:
    """Return the cells of a script in the percent format."""
    result, lines, prose, start = [], [], False, 1
    for number, line in enumerate([*script.splitlines(), "# %%"], 1):
        if line.startswith("# %%"):
            text = "\n".join(re.sub(r"^# ?", "", line) if prose else line for line in lines).strip("\n")
            if text.strip():
                result.append(Cell(prose, text, start))
            lines, prose, start = [], "[markdown]" in line, number + 1
        else:
            lines.append(line)
    return result


def fingerprint(script: str) -> str:
    """Return the fingerprint of the code. Changes of prose need no new run."""
    code = "\n".join(cell.text for cell in cells(script) if not cell.prose)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def recorded(name: str) -> dict:
    """Return the record of a tutorial, {"code": fingerprint, "output": [text per cell]}, or {}."""
    path = OUTPUT / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def stale() -> list[str]:
    """Return the names of the tutorials with code that changed after recording."""
    scripts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    return [name for name, script in scripts.items() if recorded(name).get("code") != fingerprint(script)]


SOURCE = (
    "*The source is `docs/tutorials/{name}.py`, a script that runs as it is; it is also "
    "{{download}}`a notebook <{name}.ipynb>`.*"
)


def page(name: str, prose: list[str] | None = None, source: str = SOURCE) -> str:
    """Return a tutorial as Markdown with its recorded output; `prose` replaces its texts."""
    script = cells((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    outputs = recorded(name).get("output", [])
    texts = iter([cell.text for cell in script if cell.prose] if prose is None else prose)
    parts = []
    for index, cell in enumerate(script):
        parts.append(next(texts) if cell.prose else f"```python\n{cell.text}\n```")
        printed = outputs[index].rstrip() if index < len(outputs) else ""
        if printed:
            parts.append(f"```{{code-block}} text\n:class: printed\n\n{printed}\n```")
    title, rest = parts[0].partition("\n")[::2]
    return "\n\n".join([title, source.format(name=name), rest.strip(), *parts[1:]]) + "\n"


def code_after_texts(name: str) -> list[str]:
    """Return the code after each text of a tutorial, with its recorded output, as Markdown."""
    outputs, parts = recorded(name).get("output", []), []
    for index, cell in enumerate(cells((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if cell.prose:
            parts.append("")
            continue
        parts[-1] += f"```python\n{cell.text}\n```\n\n"
        printed = outputs[index].rstrip() if index < len(outputs) else ""
        parts[-1] += f"```text\n{printed}\n```\n\n" if printed else ""
    return [part.rstrip() for part in parts]


def run(name: str) -> None:
    """Run a tutorial cell by cell in an empty folder and record the output of each cell."""
    path = FOLDER / f"{name}.py"
    script = path.read_text(encoding="utf-8")
    module = types.ModuleType("__main__")
    outputs, before, main = [], Path.cwd(), sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        os.chdir(folder)
        sys.modules["__main__"] = module
        try:
            for cell in cells(script):
                printed = io.StringIO()
                if not cell.prose:
                    code = compile("\n" * (cell.line - 1) + cell.text, str(path), "exec")
                    with contextlib.redirect_stdout(printed):
                        exec(code, module.__dict__)
                outputs.append(printed.getvalue())
        finally:
            os.chdir(before)
            sys.modules["__main__"] = main
    OUTPUT.mkdir(exist_ok=True)
    record = {"code": fingerprint(script), "output": outputs}
    (OUTPUT / f"{name}.json").write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    print(f"{name}: recorded")


if __name__ == "__main__":
    for tutorial in [path.stem for path in sorted(FOLDER.glob("*.py"))] if "--all" in sys.argv else stale():
        run(tutorial)
