"""Convert tutorials to notebooks, with the recorded output of each cell.

The site offers them for download. `python docs/site/notebooks.py [FOLDER]` writes them (default:
build/notebooks).
"""

import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from tutorials import FOLDER, cells, recorded

INSTALL = "%pip install --quiet polyformer"


def notebook(name: str) -> str:
    """Return a tutorial as the JSON of a notebook; its first cell installs the library."""
    outputs = recorded(name).get("output", [])
    parts = [new_code_cell(INSTALL, id="install")]
    for index, cell in enumerate(cells((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if cell.prose:
            parts.append(new_markdown_cell(cell.text, id=f"cell-{index}"))
            continue
        printed = outputs[index] if index < len(outputs) else ""
        streams = [new_output("stream", name="stdout", text=printed)] if printed else []
        parts.append(new_code_cell(cell.text, outputs=streams, id=f"cell-{index}"))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    document = new_notebook(cells=parts, metadata=kernel)
    nbformat.validate(document)
    return nbformat.writes(document) + "\n"


def names() -> list[str]:
    """Return the names of the tutorials."""
    return [path.stem for path in sorted(FOLDER.glob("*.py"))]


def main(folder: Path) -> None:
    """Write all notebooks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        (folder / f"{name}.ipynb").write_text(notebook(name), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "build" / "notebooks")
