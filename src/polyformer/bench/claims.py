"""What claims share: tables, models of given sizes, and runs in folders that a second call goes on with."""

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write, read_json, write_json
from polyformer.data import load
from polyformer.model.record import RECIPE
from polyformer.recipes import Recipe, Run, fit
from polyformer.recipes.find import absolute, with_data
from polyformer.recipes.fit import Fitted, own_data, settled

TINY = {"steps": 2, "batch_tokens": 64, "layers": 1, "width": 16, "heads": 2, "vocabulary": 300}
"""Settings of a language model that trains in a moment, for runs that only see that every path works."""


class Sizes(Protocol):
    """What claims say of the model that they train."""

    @property
    def layers(self) -> int:
        """How many there are."""
        ...

    @property
    def width(self) -> int:
        """Of the hidden states."""
        ...

    @property
    def heads(self) -> int:
        """In every layer."""
        ...


class SmallRun(Sizes, Protocol):
    """What claims say of a small language model and its training."""

    @property
    def data(self) -> str | None:
        """A directory with WikiText-2's {train,valid}.txt[.gz]; the default text without one."""
        ...

    @property
    def length(self) -> int:
        """Tokens of a row."""
        ...

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        ...

    @property
    def steps(self) -> int:
        """How many."""
        ...

    @property
    def vocabulary(self) -> int:
        """Tokens of the BPE."""
        ...

    @property
    def lr(self) -> float:
        """The highest learning rate."""
        ...


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Write rows below a head, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    atomic_write(path, text.getvalue().encode())


def fields_of(row: type[Any]) -> list[str]:
    """The columns of a table whose rows are of this dataclass."""
    return [field.name for field in dataclasses.fields(row)]


def decoder_options(sizes: Sizes, **options: Any) -> dict[str, Any]:
    """A recipe's model: a decoder of these sizes, feed-forwards of four times the width, and `options`."""
    return sized("decoder-tiny", sizes, **options)


def encoder_options(sizes: Sizes, **options: Any) -> dict[str, Any]:
    """The same of an encoder."""
    return sized("encoder-tiny", sizes, **options)


def sized(preset: str, sizes: Sizes, **options: Any) -> dict[str, Any]:
    """A recipe's model: the preset with these sizes, feed-forwards of four times the width, and `options`."""
    return {
        "preset": preset,
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 4 * sizes.width,
        **options,
    }


def small_recipe(sizes: SmallRun, seed: int, **options: Any) -> dict[str, Any]:
    """A small language model of WikiText-2, or of the default text, whose decoder has `options`."""
    return {
        "task": {"kind": "lm", "row_length": sizes.length, "batch_tokens": sizes.batch_tokens},
        "model": decoder_options(sizes, dropout=0.0, **options),
        "data": wikitext(sizes.data),
        "tokenizer": {"algorithm": "bpe", "vocab_size": sizes.vocabulary},
        "optimizer": {"kind": "adamw", "lr": sizes.lr},
        "schedule": {"kind": "cosine", "warmup": min(100, sizes.steps)},
        "training": {
            "steps": sizes.steps,
            "reporting": {"log_every": min(20, sizes.steps), "evaluate_every": sizes.steps},
            "saving": {"checkpoint_every": max(1, sizes.steps // 3)},
        },
        "seed": seed,
    }


def taken_up(recipe: Recipe, folder: Path) -> Fitted:
    """The run in `folder`, made or gone on with; what is finished is only read and scored.

    Raises `InputError` where the folder holds a run of another recipe.
    """
    begun = (folder / RECIPE).is_file()
    if begun:
        kept = Run.open(folder).recipe
        data = own_data(recipe) or load(recipe.data, recipe.task.needs) if kept != recipe else None
        if data is not None and kept != settled(recipe, data):
            raise InputError(f"{folder} holds a run of other settings; choose another place with --out")
    return fit(recipe, folder, resume=begun)


class KeptFigures:
    """Figures in a file, written as they are measured, which a second call goes on with.

    Raises `InputError` for a file of other settings.
    """

    def __init__(self, file: Path, settings: dict[str, Any]):
        self.file, self.settings = file, settings
        self.stored: dict[str, Any] = {}
        if file.is_file():
            self.stored = read_json(file, dict)
            if self.stored.get("settings") != settings:
                raise InputError(f"{file} holds figures of other settings; choose another place with --out")

    def write(self, **figures: Any) -> None:
        """All figures, by what they are of."""
        write_json(self.file, {"settings": self.settings, **figures})


def recipe_from_checkpoint(
    start: Path,
    tokenizer: str,
    text: str,
    *,
    row_length: int,
    steps: int,
    lr: float,
    precision: str,
    seed: int,
    **task: Any,
) -> dict[str, Any]:
    """A run of language modelling over the file `text` from the checkpoint `start`, a row in each step."""
    return {
        "task": {"kind": "lm", "row_length": row_length, "batch_tokens": row_length, **task},
        "model": {"pretrained": str(start.absolute())},
        "data": {"path": text, "format": "text", "validation_fraction": 0.0},
        "tokenizer": {"path": str(Path(tokenizer).absolute())},
        "optimizer": {"kind": "adamw", "lr": lr, "weight_decay": 0.0},
        "schedule": {"kind": "cosine", "warmup": min(20, steps)},
        "training": {
            "steps": steps,
            "engine": {"precision": precision},
            "reporting": {"log_every": 10, "evaluate_every": steps},
            "saving": {"checkpoint_every": 100},
        },
        "seed": seed,
    }


def wikitext(folder: str | None) -> dict[str, Any]:
    """A recipe's data: WikiText-2's articles in `folder`, the default text without one."""
    if folder is None:
        return {}
    files = {"path": "train.txt.gz", "validation": "valid.txt.gz", "format": "articles"}
    return absolute(with_data(files, folder))
