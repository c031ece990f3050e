"""The claim that a memory of earlier segments lowers perplexity at equal compute, and more at evaluation
(Dai et al. 2019, sections 4.1 and 4.3, tables 6 and 7), CPU-sized.

Two decoders of one size, with the same positions, read the same text in order. One remembers: segments of
`length` tokens with a memory of as many. The other reads rows of twice the length, the same reach, without a
memory, and makes as many more steps as its steps need fewer operations. Then the held-out text is read in
segments of `length` with memories from none to several times the training's. Perplexity must fall as the
memory grows to what training had, must not rise beyond, and must end below that of the decoder without.

Deviations: WikiText-2 (or the default text) in place of WikiText-103 and a model a thousand times smaller;
the paper's baseline at the same reach has the same number of steps, ours the same number of operations.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polyformer.bench.claims import taken_up, wikitext
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.memory.base import set_length
from polyformer.recipes import Recipe
from polyformer.recipes.fit import Fitted
from polyformer.tasks import LanguageModelling
from polyformer.training.config import at_least

RISES = 1.01
"""Beyond the training's memory perplexity may be so much higher than at it: rounding of a small run."""

PLAIN, SLIDING = "none, rows", "none, sliding rows"
"""The decoder without a memory, its rows one after another, and each with half of the row before."""

Measured = Mapping[str, float]
"""Perplexity by memory: its length, or `PLAIN` and `SLIDING`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLClaim(Config):
    """Sizes of the two runs; a second call goes on with what OUT holds."""

    data: str | None = (
        None  # a directory with WikiText-2's {train,valid}.txt[.gz]; by default the default text
    )
    length: int = 64  # tokens in a segment, and in the memory while training
    memories: tuple[int, ...] = (0, 16, 32, 64, 128, 256)  # tokens in the memory, in evaluation
    held_out: int = 50_000  # tokens evaluated on, in whole documents
    steps: int = 600  # of the decoder with a memory
    batch_tokens: int = 1024
    layers: int = 3
    width: int = 96
    heads: int = 4
    vocabulary: int = 2000
    lr: float = 3e-3
    seed: int = 0
    out: str = "runs/transformer-xl"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, layers=self.layers, width=self.width, heads=self.heads)
        at_least(2, length=self.length, held_out=self.held_out)
        at_least(2 * self.length, batch_tokens=self.batch_tokens)
        if not self.memories or min(self.memories) < 0:
            raise InputError(f"memories: expected lengths of 0 or more, got {list(self.memories)}")


def run(config: TransformerXLClaim) -> Measured:
    """Train and measure both; write OUT/transformer-xl.csv and .png, print a table and the verdict."""
    folder, results = Path(config.out), dict[str, float]()
    remembering = taken_up(Recipe.from_dict(recipe(config, config.length)), folder / "memory")
    for length in config.memories:
        set_length(remembering.model, length)
        results[str(length)] = perplexity(remembering, config.held_out)
        print(f"memory of {length}: perplexity {results[str(length)]:.2f}", flush=True)
    plain = taken_up(Recipe.from_dict(recipe(config, 0)), folder / "none")
    results[PLAIN] = perplexity(plain, config.held_out)
    results[SLIDING] = perplexity(plain, config.held_out, overlap=config.length)
    lines = ["memory,perplexity", *(f'"{name}",{value}' for name, value in results.items())]
    atomic_write(folder / "transformer-xl.csv", ("\n".join(lines) + "\n").encode())
    print("\n".join(table(config, results)))
    print(verdict(results, config.length))
    curves = {"with a memory": [(max(n, 1), results[str(n)]) for n in config.memories]}
    for name in (PLAIN, SLIDING):
        curves[name] = [(max(n, 1), results[name]) for n in config.memories]
    line_plot(folder / "transformer-xl.png", curves, "tokens in the memory", "perplexity", log=True)
    print(f"curves: {folder / 'transformer-xl.png'}")
    return results


def recipe(config: TransformerXLClaim, memory: int) -> dict[str, Any]:
    """The run with a memory of so many tokens; with none, of rows twice as long."""
    steps = config.steps if memory else plain_steps(config)
    return {
        "task": {
            "kind": "lm",
            "feed": "in_order",
            "row_length": config.length if memory else 2 * config.length,
            "batch_tokens": config.batch_tokens,
        },
        "model": {
            "preset": "decoder-tiny",
            "position": "transformer_xl",
            "num_hidden_layers": config.layers,
            "hidden_size": config.width,
            "num_attention_heads": config.heads,
            "intermediate_size": 4 * config.width,
            "dropout": 0.0,
            "memory": f"recurrent(length={memory})" if memory else "none",
        },
        "data": wikitext(config.data),
        "tokenizer": {"algorithm": "bpe", "vocab_size": config.vocabulary},
        "optimizer": {"kind": "adamw", "lr": config.lr},
        "schedule": {"kind": "cosine", "warmup": min(50, steps)},
        "training": {
            "steps": steps,
            "reporting": {"log_every": 50, "evaluate_every": steps},
            "saving": {"checkpoint_every": 100},
        },
        "seed": config.seed,
    }


def plain_steps(config: TransformerXLClaim) -> int:
    """Steps of the decoder without a memory for the operations of all steps with one."""
    return round(config.steps * operations(config, config.length) / operations(config, 0))


def operations(config: TransformerXLClaim, memory: int) -> float:
    """Multiplications of a forward pass for one token, on average over a row of its run.

    A layer has four projections, a feed-forward of four times the width, and for each key that a token sees
    scores by content and by position and values; a memory's keys and values are projected again, and every
    distance of a call by W_R.
    """
    square, length = config.width**2, config.length if memory else 2 * config.length
    seen = memory + length / 2
    again = 2 * square * memory / length
    distances = square * (memory + length) / config.batch_tokens
    layer = 12 * square + 3 * config.width * seen + again + distances
    return config.layers * layer + config.width * config.vocabulary


@torch.no_grad()
def perplexity(fitted: Fitted, most: int, overlap: int | None = None) -> float:
    """Per token of the first documents of the validation text, of `most` tokens or a little more, read in
    order; with `overlap`, in rows that repeat so many tokens."""
    task = fitted.task
    assert isinstance(task, LanguageModelling)
    assert fitted.splits.validation is not None
    if overlap is not None:
        options = dataclasses.replace(task.config, feed="packed", overlap=overlap)
        task = LanguageModelling(options, task.tokenizer)
    held: list[Any] = list(fitted.splits.validation)
    rows, tokens = list[Any](), 0
    while held and tokens < most:
        rows.append(held.pop(0))
        tokens += len(task.documents(rows[-1:])[0])
    return task.measure(fitted.model.eval(), task.held_out(rows))["perplexity"]


def table(config: TransformerXLClaim, results: Measured) -> list[str]:
    """Lines of text: a row for each memory."""
    steps = {True: config.steps, False: plain_steps(config)}
    rows = [f"{'memory':<22}{'steps':>8}{'perplexity':>12}"]
    for name, value in results.items():
        rows.append(f"{name:<22}{steps[name.isdigit()]:>8}{value:>12.2f}")
    return rows


def verdict(results: Measured, trained: int) -> str:
    """What the figures say of the claim."""
    curve = {int(name): value for name, value in results.items() if name.isdigit()}
    within, beyond = (sorted(n for n in curve if keep(n)) for keep in (trained.__ge__, trained.__lt__))
    if len(within) < 2 or trained not in curve:
        return f"no verdict: it needs memories of 0 to {trained} tokens"
    differs = []
    if any(curve[long] >= curve[short] for short, long in itertools.pairwise(within)):
        differs.append("perplexity does not fall as the memory grows")
    if any(curve[n] > RISES * curve[trained] for n in beyond):
        differs.append("it rises beyond the training's memory")
    best = min(curve.values())
    if best >= min(results[PLAIN], results[SLIDING]):
        differs.append("the decoder without a memory is as good")
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    figures = f"{curve[within[0]]:.2f} with {within[0]} tokens, {curve[trained]:.2f} with {trained}"
    rows = f"best {best:.2f}; without {results[PLAIN]:.2f}, sliding {results[SLIDING]:.2f}"
    return f"a memory lowers perplexity at equal compute: {outcome} ({figures}, {rows})"
