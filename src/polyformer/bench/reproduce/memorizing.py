"""The claims that perplexity falls as a memorizing model's store grows, and that a model trained without
one takes to it by a little fine-tuning (Wu et al. 2022, section 4, table 4, figures 1 and 6), CPU-sized.

Two decoders of one size read the same text in order for as many steps, with the same memory; in one of them
a layer has a store too. The held-out text is then read with stores of every size. The one without is also
given a store (`polyformer convert`) and trained for `tuning` steps more, and, beside it, for as many steps
without. Perplexity must fall as the store grows to what training had, end below that of the decoder without,
and fine-tuning must win at least half of what training with a store wins.

Deviations: a book in place of arXiv and PG-19, segments of a sixteenth of theirs, a model a thousand times
smaller, with rotary positions.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyformer.bench.claims import taken_up, write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.bench.remembering import InOrderClaim, perplexity, recipe_in_order, remembered_text
from polyformer.checkpoints import convert
from polyformer.core.errors import InputError
from polyformer.memory.memorizing import set_store
from polyformer.recipes import Recipe
from polyformer.recipes.fit import Fitted
from polyformer.training.config import at_least

RISES = 1.01
"""From one store to the next larger one perplexity may be so much higher: rounding of a small run."""

WITHOUT, FURTHER = "none", "none, trained further"
STORED, TUNED = "store", "store, fine-tuned"

Measured = Mapping[str, Mapping[int, float]]
"""Perplexity by decoder and size of the store, 0 for none."""


EXPERIMENT = Experiment(
    sources={"data": "book"},
    quick={
        "length": 8,
        "memory": 8,
        "store": 32,
        "neighbours": 2,
        "stores": (0, 16, 32),
        "steps": 2,
        "tuning": 1,
        "batch_tokens": 64,
        "layers": 2,
        "width": 16,
        "heads": 2,
        "vocabulary": 300,
        "held_out": 200,
    },
    claims=(
        Claim(
            name="memorizing-store",
            says="perplexity falls as a memorizing model's store grows",
            paper="Wu et al. 2022 (Memorizing Transformers)",
            section="section 4, table 4, figure 1",
            published="arXiv, GitHub, C4, Isabelle and PG-19: perplexity falls as the memory grows to "
            "hundreds of thousands of tokens",
            measured="perplexity by the store's entries in evaluation, beside a decoder without one",
            scale="a book, 3 layers of 96, segments and memory of 32, store of 4,096, 1,000 steps",
            rule="it does not rise by more than 1 % from store to store, falls, and ends below the "
            "decoder without",
        ),
        Claim(
            name="memorizing-tuning",
            says="a model trained without a store takes to one by a little fine-tuning",
            paper="Wu et al. 2022 (Memorizing Transformers)",
            section="section 4, figure 6",
            published="20,000 steps of fine-tuning, few beside those of training, win most of it",
            measured="what fine-tuning with a store wins over as many steps without",
            scale="a book, 3 layers of 96, segments and memory of 32, store of 4,096, 1,000 steps",
            rule="at least half of what training with a store wins",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorizingClaim(InOrderClaim):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    memory: int = 32  # tokens in the memory of all decoders
    store: int = 4096  # entries, while training
    neighbours: int = 32
    stores: tuple[int, ...] = (0, 64, 256, 1024, 4096, 16384)  # entries, in evaluation
    steps: int = 1000
    tuning: int = 250  # steps of fine-tuning
    seed: int = 0
    out: str = "runs/memorizing"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps, tuning=self.tuning, store=self.store, neighbours=self.neighbours)
        at_least(0, memory=self.memory)
        if not self.stores or min(self.stores) < 0:
            raise InputError(f"stores: expected sizes of 0 or more, got {list(self.stores)}")

    @property
    def with_store(self) -> str:
        """The memory with a store as recipes name it."""
        return f"memorizing(length={self.memory}, store={self.store}, neighbours={self.neighbours})"

    @property
    def without_store(self) -> str:
        """The memory of the other."""
        return f"recurrent(length={self.memory})"


def run(config: MemorizingClaim) -> Measured:
    """Train and measure all; write OUT/memorizing.csv and .png, print a table and the verdict."""
    folder = Path(config.out)
    data = remembered_text(config.data, folder)
    results: dict[str, dict[int, float]] = {}
    plain = _fitted(config, data, config.without_store, folder / "none")
    results[WITHOUT] = {0: _shown(WITHOUT, perplexity(plain, config.held_out))}
    results[STORED] = _by_size(config, _fitted(config, data, config.with_store, folder / "store"), STORED)
    begun = folder / "converted"
    if not begun.is_dir():
        convert(plain.model, memory=config.with_store)[0].save_pretrained(begun)
    tuned = _fitted(config, data, config.with_store, folder / "tuned", begun)
    results[TUNED] = _by_size(config, tuned, TUNED)
    further = _fitted(config, data, config.without_store, folder / "further", folder / "none")
    results[FURTHER] = {0: _shown(FURTHER, perplexity(further, config.held_out))}
    write_measured(folder, results)
    print("\n".join(table(results)))
    curves = {
        name: [(max(size, 16), sizes.get(size, sizes[0])) for size in config.stores]
        for name, sizes in results.items()
    }
    line_plot(folder / "memorizing.png", curves, "entries in the store (16: none)", "perplexity", log=True)
    print(f"curves: {folder / 'memorizing.png'}")
    conclude(EXPERIMENT, config, verdicts(results, config.store))
    return results


def _fitted(
    config: MemorizingClaim, data: dict[str, Any], memory: str, folder: Path, start: Path | None = None
) -> Fitted:
    """The run in `folder`, from random weights or, for `tuning` steps, from the checkpoint in `start`."""
    steps = config.steps if start is None else config.tuning
    settings = recipe_in_order(config, data, memory, config.length, steps, config.seed)
    settings["model"]["position"] = "rope"
    if start is not None:
        settings["model"] = {"pretrained": str(start.absolute())}
    return taken_up(Recipe.from_dict(settings), folder)


def _by_size(config: MemorizingClaim, fitted: Fitted, name: str) -> dict[int, float]:
    """Perplexity by size of the store."""
    results = {}
    for size in config.stores:
        set_store(fitted.model, size)
        results[size] = _shown(f"{name} of {size}", perplexity(fitted, config.held_out))
    return results


def _shown(name: str, value: float) -> float:
    print(f"{name}: perplexity {value:.3f}", flush=True)
    return value


def write_measured(folder: Path, results: Measured) -> None:
    """A row for each decoder and store."""
    rows = ((name, *pair) for name, sizes in results.items() for pair in sizes.items())
    write_csv(folder / "memorizing.csv", ("decoder", "store", "perplexity"), rows)


def table(results: Measured) -> list[str]:
    """Lines of text: a row for each decoder, a column for each store."""
    sizes = sorted({size for values in results.values() for size in values})
    lines = [f"{'decoder':<24}" + "".join(f"{size:>9}" for size in sizes)]
    for name, values in results.items():
        lines.append(
            f"{name:<24}" + "".join(f"{values[s]:>9.2f}" if s in values else f"{'-':>9}" for s in sizes)
        )
    return lines


def verdicts(results: Measured, trained: int) -> list[Verdict]:
    """What the figures say of both claims."""
    curve, plain = results[STORED], results[WITHOUT][0]
    within = sorted(size for size in curve if size <= trained)
    if len(within) < 2 or trained not in curve:
        text = f"no verdict: it needs stores of less than {trained} entries, and of as many"
        return [Verdict(UNSHOWN, text)] * 2
    differs = []
    if any(curve[more] > RISES * curve[less] for less, more in itertools.pairwise(within)):
        differs.append("perplexity rises as the store grows")
    if curve[trained] >= curve[within[0]]:
        differs.append("it does not fall")
    if curve[trained] >= plain:
        differs.append("the decoder without is as good")
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    won, tuned = plain - curve[trained], results[FURTHER][0] - results[TUNED][trained]
    holds = won > 0 and tuned >= won / 2
    fine = "reproduced" if holds else "differs from the paper"
    larger = (
        f"a larger store lowers perplexity: {outcome} ({curve[within[0]]:.2f} with {within[0]} entries, "
        f"{curve[trained]:.2f} with {trained}, best {min(curve.values()):.2f}; without {plain:.2f})"
    )
    tuning = (
        f"fine-tuning gives a store to a model that had none: {fine} (it wins {tuned:.2f}, beside {won:.2f} "
        "by training with a store)"
    )
    return [verdict_of(not differs, larger), verdict_of(holds, tuning)]
