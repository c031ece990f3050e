"""The table of members: mechanisms, patterns, position schemes, memories and depths at one budget.

Each is put in the place of its kind in one tiny model, a decoder and an encoder, which is trained on a book
to answer questions: some need a character that stands at least n / 4 tokens before (`questions`). Quality is
what is answered right on held-out text, beside attention to every token and a window that cannot see so far
(`verdict` has the rule). Patterns of images learn digits pixel by pixel. Every row has the same steps,
tokens, sizes, learning rate and seeds. `ms` is a training step's median time, `MiB` the peak memory of
forward and backward at 1024 tokens, `slope` the exponent of n in their time from 512 to 2048 tokens.

A member without options that are fitted here takes part with its defaults, one of your own (`--import`) too.

Deviations from any paper: all of its sizes; this says what a member can do, not what it is best at.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from polyformer.bench.claims import KeptFigures, write_csv
from polyformer.bench.machine import begin
from polyformer.bench.reproduce.members import cost, pictures, questions
from polyformer.bench.reproduce.members.listing import ABSENT, Row, every_row, fitted
from polyformer.bench.reproduce.members.questions import Rows
from polyformer.bench.reproduce.members.report import CSV, markdown, values
from polyformer.bench.reproduce.members.trial import Budget, refusal, train
from polyformer.bench.reproduce.members.verdict import Line, line
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write
from polyformer.training.config import at_least

__all__ = ["MembersClaim", "run"]

TRAIN, HELD_OUT = 400_000, 50_000
"""Characters of the book."""

HELD_OUT_SEED = 99_991


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembersClaim(Config):
    """Sizes of the runs, equal for all rows; a second call goes on with what OUT holds."""

    data: str | None = None  # the file of a book, or a directory with WikiText-2; by default the default text
    images: str | None = None  # MNIST's IDX file of images; without it there is no table of images
    members: tuple[str, ...] = ()  # words of which a row's name has one: "decoder", "lsh", "pattern"; all
    parts: tuple[str, ...] = ("quality", "cost")  # what to measure; two processes can share an OUT
    quick: bool = False  # one seed and few steps: whether everything runs
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 240
    rows: int = 8  # in a step
    length: int = 128  # characters in a row
    held_out: int = 128  # rows
    layers: int = 2
    width: int = 64
    heads: int = 2
    lr: float = 5e-3
    warmup: int = 20
    out: str = "runs/members"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, rows=self.rows, layers=self.layers, held_out=self.held_out)
        at_least(1, width=self.width, heads=self.heads, warmup=self.warmup)
        at_least(64, length=self.length)
        for part in self.parts:
            if part not in ("quality", "cost"):
                raise InputError(f"parts: expected quality or cost, got {quote(part)}")
        if not self.seeds:
            raise InputError("seeds: expected one or more")

    @property
    def budget(self) -> Budget:
        """What every training has."""
        steps = min(self.steps, 4) if self.quick else self.steps
        return Budget(
            steps, self.rows, self.length, self.layers, self.width, self.heads, self.lr, self.warmup
        )

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds that are run."""
        return self.seeds[:1] if self.quick else self.seeds


def run(config: MembersClaim) -> list[Line]:
    """Train and measure all rows; write OUT/members.md, .csv and the figures, print the tables."""
    begin(None)
    folder = Path(config.out)
    settings = {"data": config.data, "images": config.images, "held_out": config.held_out}
    settings |= dataclasses.asdict(config.budget)
    kept = {part: KeptFigures(folder / f"{part}.json", settings) for part in ("quality", "cost")}
    rows = [row for row in every_row() if row.table != "image" or config.images]
    chosen = [row for row in rows if not config.members or any(word in row.name for word in config.members)]
    if not chosen:
        raise InputError(f"members: no row has any of {', '.join(config.members)} in its name")
    if "quality" in config.parts:
        _qualities(config, chosen, kept["quality"])
    if "cost" in config.parts:
        _costs(config, chosen, kept["cost"])
    quality, costs = kept["quality"].stored, kept["cost"].stored
    scores, slopes, mebibytes = (
        figures.get(name, {})
        for figures, name in ((quality, "scores"), (costs, "slopes"), (costs, "mebibytes"))
    )
    lines = [
        line(row, _sized(config, row), scores, slopes.get(row.name), mebibytes.get(row.name))
        for row in rows
        if row.name in scores
    ]
    refused = {
        f"{row.table} {_sized(config, row)}": reason
        for row in rows
        if (reason := quality.get("refused", {}).get(row.name))
    }
    text = markdown(lines, refused, ABSENT)
    atomic_write(folder / "members.md", text.encode())
    write_csv(folder / "members.csv", CSV, map(values, lines))
    print(text)
    return lines


def _sized(config: MembersClaim, row: Row) -> str:
    return fitted(row.expression, pictures.SIDE**2 if row.table == "image" else config.length)


def _qualities(config: MembersClaim, rows: list[Row], kept: KeptFigures) -> None:
    """Every row with every seed, a seed at a time."""
    figures: dict[str, dict[str, Any]] = {name: kept.stored.get(name, {}) for name in ("scores", "refused")}
    batches = Batches(config)
    for seed in config.all_seeds:
        for row in rows:
            scores = figures["scores"].get(row.name, {})
            if str(seed) in scores or row.name in figures["refused"]:
                continue
            training, held_out, vocabulary = batches.of(row.table, seed)
            budget = dataclasses.replace(config.budget, length=held_out.answers.shape[1])
            reason = refusal(row, budget, training[0], vocabulary)
            if reason is not None:
                figures["refused"][row.name] = reason
            else:
                score = train(row, budget, training, held_out, vocabulary, seed)
                figures["scores"][row.name] = scores | {str(seed): dataclasses.asdict(score)}
                shown = ", ".join(f"{kind} {nats:.3f}" for kind, nats in score.nats.items())
                print(f"{row.name}, seed {seed}: {shown} nats, {score.milliseconds:.0f} ms", flush=True)
            kept.write(**figures)
    kept.stored = figures


def _costs(config: MembersClaim, rows: list[Row], kept: KeptFigures) -> None:
    """The slope and the peak memory of every row's model; a quick run leaves them out."""
    figures = {name: dict[str, float](kept.stored.get(name, {})) for name in ("slopes", "mebibytes")}
    for row in rows if not config.quick else []:
        if row.name in figures["mebibytes"] or _refused(config, row):
            continue
        figures["slopes"][row.name] = cost.slope(row, config.budget)
        figures["mebibytes"][row.name] = cost.mebibytes(row, config.budget)
        kept.write(**figures)
        slope, most = (figures[name][row.name] for name in ("slopes", "mebibytes"))
        print(f"{row.name}: slope {slope:.2f}, {most:.0f} MiB", flush=True)
    kept.stored = figures


def _refused(config: MembersClaim, row: Row) -> bool:
    try:
        cost.step(cost.Step(row, config.budget, cost.WARM_LENGTH))()
    except InputError:
        return True
    return False


class Batches:
    """The batches of every table and seed, prepared once."""

    def __init__(self, config: MembersClaim):
        self.config = config
        self.text = questions.characters(config.data, Path(config.out), TRAIN, HELD_OUT)
        self.made: dict[tuple[str, int], tuple[list[Rows], Rows, int]] = {}

    def of(self, table: str, seed: int) -> tuple[list[Rows], Rows, int]:
        """Batches to train on, held-out rows, and the size of the vocabulary."""
        if (table, seed) not in self.made:
            generator = torch.Generator().manual_seed(seed)
            make = self._images if table == "image" else self._questions
            self.made = {(table, seed): make(table, generator)} | self.made
        return self.made[table, seed]

    def _questions(self, table: Any, generator: torch.Generator) -> tuple[list[Rows], Rows, int]:
        config = self.config
        train, held_out = self.text
        later = torch.Generator().manual_seed(HELD_OUT_SEED)
        batches = [
            questions.questions(train, config.rows, config.length, table, generator)
            for _ in range(config.budget.steps)
        ]
        held = questions.questions(held_out, config.held_out, config.length, table, later)
        return batches, held, questions.VOCABULARY

    def _images(self, table: str, generator: torch.Generator) -> tuple[list[Rows], Rows, int]:
        config = self.config
        assert config.images is not None
        images = pictures.pixels(config.images, 10_000)
        held, train = images[: config.held_out], images[config.held_out :]
        batches = [
            pictures.as_rows(train[torch.randint(len(train), (config.rows,), generator=generator)])
            for _ in range(config.budget.steps)
        ]
        return batches, pictures.as_rows(held), pictures.LEVELS
