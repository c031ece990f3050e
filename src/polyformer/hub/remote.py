"""What lets `AutoModel` load a saved folder where polyformer is installed and nobody has imported it.

config.json names, for each Auto class, a class of a module in the folder (`auto_map`), which transformers
imports when it is asked to (`trust_remote_code=True`). The module holds one import: the code is the
package's.
"""

from os import PathLike
from pathlib import Path
from typing import Any

from polyformer.core.files import atomic_write

MODULE = "modeling_polyformer"


def auto_map(kind: type[Any]) -> dict[str, str]:
    """The classes by the names of transformers' Auto classes, for a model of the class `kind`."""
    task = kind.__name__.removeprefix("Polyformer")
    names = {"AutoConfig": "PolyformerConfig", "AutoModel": "PolyformerModel"}
    if task.startswith("For"):
        names[f"AutoModel{task}"] = kind.__name__
    return {auto: f"{MODULE}.{name}" for auto, name in names.items()}


def write_module(folder: str | PathLike[str], names: dict[str, str]) -> None:
    """The module that `names`, an `auto_map`, speaks of."""
    classes = ", ".join(sorted({name.removeprefix(f"{MODULE}.") for name in names.values()}))
    text = (
        '"""Read by transformers with trust_remote_code=True. It needs `pip install polyformer`."""\n\n'
        f"from polyformer.hub import {classes}\n"
    )
    atomic_write(Path(folder) / f"{MODULE}.py", text.encode())
