"""The claim that a memory of earlier segments lowers perplexity at equal compute, and more at evaluation
(Dai et al. 2019, sections 4.1 and 4.3, tables 6, 7 and 10), CPU-sized.

Decoders of one size, with the same positions, read the same text in order. One remembers: segments of
`length` tokens with a memory of as many. Two do not, and make as many more steps as theirs need fewer
operations: one reads the same segments, as in the paper's ablation, the other rows of twice the length,
which reach as far back as the memory. Then the held-out text is read in segments of `length` with memories
from none to several times the training's. Perplexity must fall as the memory grows to what training had,
must not rise beyond, and must end below that of the same segments without a memory. Whether the longer rows
are better is said beside it: in the paper rows without a memory are at most 1.4 times the segment.

Deviations: a book, WikiText-2 or the default text in place of WikiText-103, and a model a thousand times
smaller; the paper's rivals have the same number of steps, or the same memory of a GPU, ours the same number
of operations.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyformer.bench.claims import TINY, taken_up, write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.bench.remembering import InOrderClaim, perplexity, recipe_in_order, remembered_text
from polyformer.core.errors import InputError
from polyformer.memory.base import set_length
from polyformer.recipes import Recipe
from polyformer.training.config import at_least

RISES = 1.01
"""Beyond the training's memory perplexity may be so much higher than at it: rounding of a small run."""

Measured = Mapping[str, float]
"""Perplexity by memory: its length, or what `without` calls a decoder that has none."""


EXPERIMENT = Experiment(
    sources={"data": "book"},
    quick={
        **TINY,
        "length": 16,
        "memories": (0, 16),
        "held_out": 200,
    },
    claims=(
        Claim(
            name="transformer-xl",
            says="a memory of earlier segments lowers perplexity at equal compute, and more at evaluation",
            paper="Dai et al. 2019 (Transformer-XL)",
            section="sections 4.1 and 4.3, tables 6, 7 and 10",
            published="WikiText-103: lower perplexity with recurrence than without at one size, and lower "
            "still with longer memories at evaluation",
            measured="perplexity by the memory's length, beside decoders without one that make as many "
            "more steps as theirs are cheaper",
            scale="a book, 3 layers of 96, segments and memory of 32, 2,000 steps",
            rule="it falls to the training's memory, does not rise beyond by more than 1 %, and ends "
            "below the same segments without",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLClaim(InOrderClaim):
    """Sizes of the runs; `length` is that of the memory too, while training. A second call goes on with what
    OUT holds."""

    memories: tuple[int, ...] = (0, 8, 16, 32, 64, 128)  # tokens in the memory, in evaluation
    steps: int = 2000  # of the decoder with a memory
    seed: int = 0
    out: str = "runs/transformer-xl"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps)
        if not self.memories or min(self.memories) < 0:
            raise InputError(f"memories: expected lengths of 0 or more, got {list(self.memories)}")


def without(row: int) -> tuple[str, str]:
    """The decoder without a memory: its rows one after another, and each with half of the row before."""
    return f"none, rows of {row}", f"none, sliding rows of {row}"


def run(config: TransformerXLClaim) -> Measured:
    """Train and measure all; write OUT/transformer-xl.csv and .png, print a table and the verdict."""
    folder, results = Path(config.out), dict[str, float]()
    data = remembered_text(config.data, folder)
    recipes = {
        (memory, row): Recipe.from_dict(recipe(config, data, memory, row))
        for memory, row in [(config.length, config.length), *((0, row) for row in rows(config.length))]
    }
    for (memory, row), ours in recipes.items():
        fitted = taken_up(ours, folder / (f"memory-{memory}" if memory else f"rows-{row}"))
        if memory:
            for length in config.memories:
                set_length(fitted.model, length)
                results[str(length)] = perplexity(fitted, config.held_out)
        else:
            plain, sliding = without(row)
            results[plain] = perplexity(fitted, config.held_out)
            results[sliding] = perplexity(fitted, config.held_out, overlap=row // 2)
    write_csv(folder / "transformer-xl.csv", ("memory", "perplexity"), results.items())
    print("\n".join(table(config, results)))
    curves = {"with a memory": [(max(n, 1), results[str(n)]) for n in config.memories]}
    for name in results:
        if not name.isdigit():
            curves[name] = [(max(n, 1), results[name]) for n in config.memories]
    line_plot(folder / "transformer-xl.png", curves, "tokens in the memory", "perplexity", log=True)
    print(f"curves: {folder / 'transformer-xl.png'}")
    conclude(EXPERIMENT, config, [verdict(results, config.length)])
    return results


def recipe(config: TransformerXLClaim, data: dict[str, Any], memory: int, row: int) -> dict[str, Any]:
    """The run of rows of so many tokens with such a memory."""
    steps = config.steps if memory else plain_steps(config, row)
    kind = f"recurrent(length={memory})" if memory else "none"
    return recipe_in_order(config, data, kind, row, steps, config.seed)


def plain_steps(config: TransformerXLClaim, row: int) -> int:
    """Steps of the decoder without a memory for the operations of all steps with one."""
    return round(config.steps * operations(config, config.length, config.length) / operations(config, 0, row))


def operations(config: TransformerXLClaim, memory: int, row: int) -> float:
    """Multiplications of a forward pass for one token, on average over a row.

    A layer has four projections, a feed-forward of four times the width, and for each key that a token sees
    scores by content and by position and values; a memory's keys and values are projected again, and every
    distance of a call by W_R.
    """
    square, seen = config.width**2, memory + row / 2
    again = 2 * square * memory / row
    distances = square * (memory + row) / config.batch_tokens
    layer = 12 * square + 3 * config.width * seen + again + distances
    return config.layers * layer + config.width * config.vocabulary


def table(config: TransformerXLClaim, results: Measured) -> list[str]:
    """Lines of text: a row for each memory."""
    steps = {name: plain_steps(config, row) for row in rows(config.length) for name in without(row)}
    lines = [f"{'memory':<28}{'steps':>8}{'perplexity':>12}"]
    for name, value in results.items():
        lines.append(f"{name:<28}{steps.get(name, config.steps):>8}{value:>12.2f}")
    return lines


def rows(length: int) -> tuple[int, int]:
    """Tokens in the rows of the two decoders without a memory."""
    return length, 2 * length


def verdict(results: Measured, trained: int) -> Verdict:
    """What the figures say of the claim."""
    curve = {int(name): value for name, value in results.items() if name.isdigit()}
    within, beyond = (sorted(n for n in curve if keep(n)) for keep in (trained.__ge__, trained.__lt__))
    if len(within) < 2 or trained not in curve:
        return Verdict(UNSHOWN, f"no verdict: it needs memories of 0 to {trained} tokens")
    differs = []
    if any(curve[long] >= curve[short] for short, long in itertools.pairwise(within)):
        differs.append("perplexity does not fall as the memory grows")
    if any(curve[n] > RISES * curve[trained] for n in beyond):
        differs.append("it rises beyond the training's memory")
    best = min(curve.values())
    segments, reach = ([results[name] for name in without(row)] for row in rows(trained))
    if best >= min(segments):
        differs.append("the same segments without a memory are as good")
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    figures = f"{curve[within[0]]:.2f} with {within[0]} tokens, {curve[trained]:.2f} with {trained}"
    plain = f"best {best:.2f}; without {segments[0]:.2f}, sliding {segments[1]:.2f}"
    better = "better" if min(reach) < best else "worse"
    longer = f"rows of {2 * trained} without a memory are {better}: {reach[0]:.2f}, sliding {reach[1]:.2f}"
    text = f"a memory lowers perplexity at equal compute: {outcome} ({figures}, {plain}); {longer}"
    return verdict_of(not differs, text)
