"""The module in a saved folder by which `AutoModel` loads it if polyformer is installed but not imported.

config.json names, for each Auto class, a class of a module in the folder (`auto_map`), which transformers
imports with `trust_remote_code=True`. The module contains only one import: the code is in the package.
"""

from os import PathLike
from pathlib import Path
from typing import Any

from polyformer.core.files import atomic_write

MODULE = "modeling_polyformer"


def auto_map(kind: type[Any]) -> dict[str, str]:
    """Return the classes by the names of transformers' Auto classes, for a model of the class `kind`."""
    task = kind.__name__.removeprefix("Polyformer")
    names = {"AutoConfig": "PolyformerConfig", "AutoModel": "PolyformerModel"}
    if task.startswith("For"):
        names[f"AutoModel{task}"] = kind.__name__
    return {auto: f"{MODULE}.{name}" for auto, name in names.items()}


def write_module(folder: str | PathLike[str], names: dict[str, str]) -> None:
    """Write the module that `names`, an `auto_map`, refers to."""
    classes = ", ".join(sorted({name.removeprefix(f"{MODULE}.") for name in names.values()}))
    text = (
        '"""Read by transformers with trust_remote_code=True. It needs `pip install polyformer`."""\n\n'
        f"from polyformer.models.transformers import {classes}\n"
    )
    atomic_write(Path(folder) / f"{MODULE}.py", text.encode())
