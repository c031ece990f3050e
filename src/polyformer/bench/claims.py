"""What claims share whose runs lie in a folder each: a second call goes on with what is there."""

from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.recipes import Recipe, Run, fit
from polyformer.recipes.find import absolute, with_data
from polyformer.recipes.fit import Fitted
from polyformer.recipes.run import RECIPE


def taken_up(recipe: Recipe, folder: Path) -> Fitted:
    """The run in `folder`, made or gone on with; what is finished is only read and scored.

    Raises `InputError` where the folder holds a run of another recipe.
    """
    begun = (folder / RECIPE).is_file()
    if begun and Run.open(folder).recipe != recipe:
        raise InputError(f"{folder} holds a run of other settings; choose another place with --out")
    return fit(recipe, folder, resume=begun)


def wikitext(folder: str | None) -> dict[str, Any]:
    """A recipe's data: WikiText-2's articles in `folder`, the default text without one."""
    if folder is None:
        return {}
    files = {"path": "train.txt.gz", "validation": "valid.txt.gz", "format": "articles"}
    return absolute(with_data(files, folder))
