"""Sizes of models and of training for the data of a user: a table for each kind of task.

A run takes about five minutes on two ordinary cores. The tables of translation, labels, tags and images come
from measurements (docs/results/training.md); those of pairs, choices and answers follow them, not measured.
A row of a table is chosen by the amount of data, in tokens of text or in images. Few data are read often by a
small model with a small vocabulary; many data are read once, by a model that is as large as the time allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyformer.data.formats.columns import KINDS, rows_of_part
from polyformer.data.formats.guess import Guess
from polyformer.data.formats.images import SUFFIXES
from polyformer.data.prepared.rows import is_prepared_source, open_prepared
from polyformer.data.sources.origins import has_validation, open_source, source_files
from polyformer.training.recipes.recipe import with_changes

CHARACTERS_PER_TOKEN = 4
"""Characters of a token, for estimates before there is a tokenizer."""

SAMPLED_TOKENS = 4_000_000
"""Tokens after which counting ends: no table distinguishes more."""

SAMPLED_ROWS = 60_000
"""The same in rows."""

LONG = 128
"""Tokens of an average text from which on `LONG_TEXTS` holds."""

HEAD = 32
"""Dimensions of an attention head."""

STEM = "patch_size", "convolutional_stem"
"""Options of a model of images that are guessed before the table is read."""

LEAST_STEPS = 100
"""Steps of the smallest data: below, the learning rate has no time to rise and fall."""


@dataclass(frozen=True)
class Amount:
    """The size of the training data: rows, and estimated tokens of text; `more`: counting ended before."""

    rows: int
    tokens: int = 0
    more: bool = False

    def __str__(self) -> str:
        least = "at least " if self.more else ""
        if not self.tokens:
            return f"{least}{self.rows:,} images"
        return f"{least}{self.rows:,} row{'s' * (self.rows != 1)} of {round_number(self.tokens):,} tokens"


@dataclass(frozen=True)
class Size:
    """A row of a table, for at least `least` tokens (or images) of data."""

    least: int
    layers: int  # of every stack
    hidden: int  # the width; a head has 32 dimensions
    vocab: int  # tokens of the tokenizer; 0 for images
    dropout: float
    passes: int  # the most passes over the data
    steps: int  # the most steps, by the time that they take


@dataclass(frozen=True)
class Table:
    """The sizes for a kind of task, and settings of a recipe that do not depend on the amount of data."""

    model: str  # the preset that is resized
    batch: int  # tokens (or images) in a batch
    rate: float  # the learning rate
    optimizer: Mapping[str, Any]
    sizes: tuple[Size, ...]
    stacks: tuple[str, ...] = ("encoder",)
    feedforward: int = 4  # inner width over width
    settings: Mapping[str, Any] = field(default_factory=dict)  # more options, by dotted names


MUON = {"kind": "muon", "adam_lr": 3.0e-3}
STRONG_DECAY = {"kind": "adamw", "weight_decay": 1.0, "decay_embeddings": True}

SEQUENCES = (
    #     tokens, layers, width, vocab, dropout, passes, steps
    Size(0, 2, 64, 600, 0.3, 40, 400),
    Size(30_000, 2, 128, 1_500, 0.2, 30, 800),
    Size(300_000, 2, 128, 2_000, 0.1, 12, 900),
)
ENCODERS = (
    Size(0, 2, 64, 1_500, 0.3, 20, 400),
    Size(20_000, 2, 128, 4_000, 0.3, 20, 800),
    Size(1_000_000, 2, 128, 8_000, 0.2, 8, 1_200),
)

BOTH = "encoder", "decoder"

TABLES: dict[str, Table] = {
    "translate": Table("transformer-small", 2048, 1e-2, MUON, SEQUENCES, BOTH),
    "lm": Table(
        "decoder-small",
        2048,
        1e-2,
        MUON,
        (
            Size(0, 2, 64, 512, 0.2, 20, 400),
            Size(50_000, 4, 128, 1_024, 0.2, 8, 800),
            Size(400_000, 4, 128, 2_048, 0.0, 4, 900),
        ),
        stacks=("decoder",),
        settings={"model.position": "rope", "task.row_length": 256},
    ),
    "classify": Table(
        "encoder-small",
        4096,
        2e-3,
        STRONG_DECAY,
        (
            Size(0, 1, 64, 4_000, 0.5, 20, 400),
            Size(50_000, 1, 64, 8_000, 0.5, 10, 600),
            Size(300_000, 1, 64, 16_000, 0.5, 4, 1_000),
        ),
        feedforward=1,
        settings={"tokenizer.lowercase": True, "task.token_dropout": 0.3},
    ),
    "classify_pair": Table("encoder-small", 4096, 5e-3, MUON, ENCODERS),
    "tag": Table(
        "encoder-small",
        2048,
        5e-3,
        MUON,
        (
            Size(0, 2, 64, 3_000, 0.3, 8, 400),
            Size(20_000, 2, 128, 6_000, 0.3, 8, 800),
            Size(1_000_000, 2, 128, 8_000, 0.2, 8, 1_200),
        ),
        settings={"model.position": "rope", "model.attention": "Window(2)", "task.token_dropout": 0.3},
    ),
    "qa": Table("encoder-small", 4096, 5e-3, MUON, ENCODERS),
    "classify_image": Table(
        "vit-mini",
        64,
        1e-2,
        MUON,
        (
            Size(0, 4, 96, 0, 0.1, 100, 1_000),
            Size(1_000, 6, 96, 0, 0.1, 60, 2_200),
        ),
        feedforward=2,
    ),
}
"""The table for each kind of task; other kinds keep the settings of their recipe."""

LONG_TEXTS = {
    "classify": Table(  # about 50 texts a step, or the gradient is too noisy
        "encoder-small",
        16_384,
        3e-3,
        STRONG_DECAY,
        (
            Size(0, 1, 64, 8_000, 0.3, 6, 150),
            Size(300_000, 1, 64, 16_000, 0.3, 3, 250),
        ),
        feedforward=1,
        settings={
            "tokenizer.lowercase": True,
            "task.token_dropout": 0.3,
            "task.max_length": 1024,
            "model.position": "none",
        },
    ),
}
"""The tables for texts of at least `LONG` tokens on average."""

PHOTOGRAPHS = {
    "classify_image": Table(
        "vit-mini",
        64,
        3e-3,
        MUON,
        (
            Size(0, 4, 96, 0, 0.1, 100, 1_000),
            Size(1_000, 6, 96, 0, 0.1, 60, 2_000),
        ),
        feedforward=2,
    ),
}
"""The tables for colour images, with patches by convolutions."""

SAME = {"classify_grouped": "classify_pair", "regress_pair": "classify_pair", "choose": "classify_pair"}
"""Kinds of task with the table of another."""


def with_sizes(
    recipe: dict[str, Any], data: Mapping[str, Any], stated: Mapping[str, Any], guessed: Guess
) -> dict[str, Any]:
    """Return `recipe` with the choices of its table, and explain those that the user does not state.

    data: the options of the data. stated: the options of the user, by dotted names. The recipe is returned
    unchanged for other kinds of task.
    """
    kind = SAME.get(guessed.kind, guessed.kind)
    if kind not in TABLES:
        return recipe
    amount = measured_amount(data, guessed.kind)
    is_long = kind in LONG_TEXTS and amount.tokens > LONG * amount.rows
    is_photograph = kind in PHOTOGRAPHS and recipe["model"].get("convolutional_stem", False)
    table = (LONG_TEXTS if is_long else PHOTOGRAPHS if is_photograph else TABLES)[kind]
    size = chosen_size(table, amount)
    number = "task.batch_tokens" if size.vocab else "task.batch_size"
    batch = int(stated.get(number, table.batch))
    steps = int(stated.get("training.steps", chosen_steps(size, amount, batch, len(table.stacks))))
    chosen = {number: batch, **_model_options(table, size, stated), **_training_options(data, steps)}
    chosen |= table.settings
    if "task.max_length" in chosen:
        chosen["task.max_length"] = min(chosen["task.max_length"], batch)
    if size.vocab and not is_prepared_source(data["path"]):
        chosen["tokenizer.vocab_size"] = size.vocab
    _explain(guessed, table, size, amount, steps, batch, chosen, stated)
    # The guess of the patches follows the size of the images, which the tables do not know.
    patches = {name: recipe["model"][name] for name in STEM if name in recipe["model"]}
    model = {"preset": table.model, **patches}
    recipe = {**recipe, "model": model, "optimizer": {**table.optimizer, "lr": table.rate}}
    return with_changes(recipe, chosen)


def measured_amount(data: Mapping[str, Any], kind: str) -> Amount:
    """Return the amount of training data, counted in rows until no table distinguishes more.

    Image files are counted without reading them, prepared text by its own counts.
    """
    path = data["path"]
    if is_prepared_source(path):
        parts = getattr(open_prepared(path, "train"), "parts", ())
        return Amount(sum(map(len, parts)), sum(part.tokens for part in parts))
    if kind == "classify_image":
        pictures = [file for file in source_files(path) if file.suffix.lower() in SUFFIXES]
        if pictures:
            return Amount(len(pictures))
    columns = data.get("columns") or {}
    roles = {*KINDS.get(SAME.get(kind, kind), ("source", "target"))} - {"image", "label", "tags", "answers"}
    names = [columns.get(role, role) for role in roles]
    rows = characters = 0
    source = open_source(path, "train", data.get("format"), data.get("header"))
    if data.get("split"):
        source = rows_of_part(source, data["split"], "train", path)
    for row in source:
        rows += 1
        characters += sum(_characters(row.get(name)) for name in names)
        if rows == SAMPLED_ROWS or characters > CHARACTERS_PER_TOKEN * SAMPLED_TOKENS:
            return Amount(rows, characters // CHARACTERS_PER_TOKEN, more=True)
    return Amount(rows, characters // CHARACTERS_PER_TOKEN)


def _characters(value: Any) -> int:
    """Return the number of characters of a text, or of a list of words with spaces."""
    if isinstance(value, str):
        return len(value)
    return sum(1 + _characters(part) for part in value) if isinstance(value, list) else 0


def chosen_size(table: Table, amount: Amount) -> Size:
    """Return the last row of the table that the amount reaches."""
    number = amount.tokens if table.sizes[0].vocab else amount.rows
    return [size for size in table.sizes if size.least <= number or size is table.sizes[0]][-1]


def chosen_steps(size: Size, amount: Amount, batch: int, sides: int) -> int:
    """Return the number of steps: `size.passes` over the data, within the limits of the table.

    sides: 2 for pairs, of which a batch counts the longer side.
    """
    number = amount.tokens if size.vocab else amount.rows
    steps = size.passes * number // (sides * batch)
    return max(LEAST_STEPS, min(size.steps, steps - steps % 10))


def _model_options(table: Table, size: Size, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the model, except the preset.

    Attention weights have no dropout, which costs half of the time, unless the user states an attention:
    other mechanisms may have no such option.
    """
    hidden = int(stated.get("model.hidden_size", size.hidden))
    options: dict[str, Any] = {
        "num_hidden_layers": size.layers,
        "hidden_size": hidden,
        "num_attention_heads": max(1, hidden // HEAD),
        "intermediate_size": table.feedforward * hidden,
        "dropout": size.dropout,
    }
    if all({"attention", "mechanism"}.isdisjoint(name.split(".")) for name in stated):
        options |= {f"{stack}.attention.mechanism.dropout": 0.0 for stack in table.stacks}
    return {f"model.{name}": value for name, value in options.items()}


def _training_options(data: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the options of a run of `steps`: eight evaluations, of which the best is kept."""
    held_out = data.get("validation") or data.get("validation_fraction") != 0
    return {
        "training.steps": steps,
        "schedule.warmup": min(100, steps // 10),
        "training.reporting.log_every": max(1, min(50, steps // 20)),
        "training.reporting.evaluate_every": max(1, steps // 8),
        "training.saving.checkpoint_every": max(1, steps // 4),
        "training.saving.final": "best" if held_out or has_validation(data["path"]) else "last",
    }


def _explain(
    guessed: Guess,
    table: Table,
    size: Size,
    amount: Amount,
    steps: int,
    batch: int,
    chosen: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> None:
    """Add a line for each choice that the user does not state."""
    what = "tokens" if size.vocab else "images"
    passes = steps * batch * len(table.stacks) / max(1, amount.tokens if size.vocab else amount.rows)
    rows = batch * amount.rows / max(1, amount.tokens if size.vocab else amount.rows)
    stacks = f"{size.layers} + {size.layers}" if len(table.stacks) > 1 else f"{size.layers}"
    layers = f"{stacks} layer{'s' * (stacks != '1')} of {chosen['model.hidden_size']}"
    warmup = chosen["schedule.warmup"]
    lines = (
        ("model", layers, f"for {amount}", "model.hidden_size"),
        ("vocabulary", size.vocab, f"for {amount}", "tokenizer.vocab_size"),
        ("max_length", chosen.get("task.max_length"), f"for {amount}", "task.max_length"),
        ("dropout", size.dropout, f"as the data are read {passes:.3g} times", "model.dropout"),
        (
            "batch",
            f"{batch} {what}",
            f"about {rows:,.0f} rows a step" if rows >= 1 else "part of a row a step",
            "task.batch_tokens" if size.vocab else "task.batch_size",
        ),
        (
            "steps",
            steps,
            f"{passes:.3g} passes over the data, at most five minutes on two cores",
            "training.steps",
        ),
        (
            "learning rate",
            table.rate,
            f"after {warmup} steps of warm-up, for {table.optimizer['kind']}",
            "optimizer.lr",
        ),
    )
    for name, value, why, option in lines:
        if option not in stated and option in {*chosen, "optimizer.lr"}:
            guessed.explain(name, value, why, f"--{option}")


def round_number(number: int) -> int:
    """Return a number rounded to two digits, as an estimate is said."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return round(number / unit) * unit


def size_table() -> str:
    """Return `TABLES` as a Markdown table."""
    named = [(_kinds(name), table) for name, table in TABLES.items()]
    named += [(f"`{name}` of long texts", table) for name, table in LONG_TEXTS.items()]
    named += [(f"`{name}` of colour images", table) for name, table in PHOTOGRAPHS.items()]
    head = "| task | from | layers of width | vocabulary | dropout | at most | learning rate |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, table in named:
        what = "tokens" if table.sizes[0].vocab else "images"
        for size in table.sizes:
            layers = " + ".join([str(size.layers)] * len(table.stacks))
            steps = f"{size.steps:,} steps of {table.batch:,} {what}, {size.passes} passes"
            first = name if size is table.sizes[0] else ""
            vocab = f"{size.vocab:,}" if size.vocab else ""
            rate = f"{table.rate:g} ({table.optimizer['kind']})"
            lines.append(
                f"| {first} | {size.least:,} {what} | {layers} of {size.hidden} | {vocab} | {size.dropout} | "
                f"{steps} | {rate} |"
            )
    return "\n".join(lines)


def _kinds(name: str) -> str:
    """Return the kinds of task with the table `name`."""
    return ", ".join(f"`{kind}`" for kind in (name, *(kind for kind, table in SAME.items() if table == name)))
