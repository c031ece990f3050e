"""The claim "batch normalisation trains worse on text than layer normalisation" (Shen et al. 2020, sections 1
and 3), CPU-sized.

Pairs of equal language models, one pair a seed, that differ in the norm alone: the same weights at the start,
batches, steps and learning rates. Batch normalisation takes the statistics of a training batch over its real
tokens, and in evaluation running ones.

The rule, set before any run: the claim holds where batch normalisation ends with the higher validation loss
for every seed, and by `APART` or more in the mean. Beside it stands the loss of the last training batches, in
which a token's statistics know of its future: where that is alike and validation is not, the running
statistics are to blame, which the paper holds responsible.

Deviations: WikiText-2 (or the default text) and hundreds of steps of a small decoder, in place of translation
and WikiText-103.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path

from polyformer.bench.claims import TINY, fields_of, small_recipe, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.recipes import Recipe
from polyformer.training.config import at_least
from polyformer.training.curves import series
from polyformer.training.metrics import read_metrics

APART = 0.05
"""Nats a token: the least mean difference of validation loss that counts as worse."""

NORMS = ("layer", "batch")


EXPERIMENT = Experiment(
    sources={"data": "wikitext2"},
    quick={
        **TINY,
        "seeds": (0,),
        "length": 16,
    },
    claims=(
        Claim(
            name="batch-norm",
            says="batch normalisation trains worse on text than layer normalisation",
            paper="Shen et al. 2020 (PowerNorm)",
            section="sections 1 and 3",
            published="translation and WikiText-103: batch normalisation loses BLEU and perplexity beside "
            "layer normalisation",
            measured="validation loss of pairs of decoders that differ in the norm alone",
            scale="2 layers of 64, 300 steps of 1,024 tokens of WikiText-2, three seeds",
            rule="its validation loss is the higher for every seed, and by 0.05 nats a token or more "
            "in the mean",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchNormClaim(Config):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    data: str | None = None  # a directory with WikiText-2's {train,valid}.txt[.gz]; else the default text
    seeds: tuple[int, ...] = (0, 1, 2)
    block: str = "post"  # where norms stand: also "pre"
    steps: int = 300
    length: int = 128  # tokens of a row
    batch_tokens: int = 1024
    layers: int = 2
    width: int = 64
    heads: int = 4
    vocabulary: int = 1000
    lr: float = 2e-3
    out: str = "runs/batch-norm"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, layers=self.layers, width=self.width, heads=self.heads)
        if not self.seeds:
            raise InputError("seeds: expected one or more")


@dataclasses.dataclass(frozen=True)
class Ended:
    """Losses, nats a token: of the last training batches, in training mode, and of the validation text."""

    training: float
    validation: float


Results = Mapping[tuple[str, int], Ended]
"""By norm and seed."""


def run(config: BatchNormClaim) -> Results:
    """Train all, write OUT/batch_norm.csv and .png, print the table and the verdict."""
    folder, results = Path(config.out), dict[tuple[str, int], Ended]()
    curves: dict[str, list[tuple[float, float]]] = {}
    for seed in config.seeds:
        for norm in NORMS:
            out = folder / f"{norm}-{seed}"
            fitted = taken_up(
                Recipe.from_dict(small_recipe(config, seed, block=config.block, norm=norm)), out
            )
            curve = list(zip(*series(read_metrics(out), "loss")))
            curves[f"{norm}, seed {seed}"] = curve
            training = statistics.mean(loss for _, loss in curve[-5:])
            results[norm, seed] = Ended(training, fitted.scores["validation"]["loss"])
            print(f"{norm} norm, seed {seed}: {_losses(results[norm, seed])}", flush=True)
    rows = ((*key, *dataclasses.astuple(ended)) for key, ended in results.items())
    write_csv(folder / "batch_norm.csv", ("norm", "seed", *fields_of(Ended)), rows)
    line_plot(folder / "batch_norm.png", curves, "step", "training loss, nats a token")
    print(f"curves: {folder / 'batch_norm.png'}")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


def verdict(results: Results) -> Verdict:
    """What the validation losses say of the claim, and where the difference arises."""
    seeds = sorted({seed for _, seed in results})
    behind = [results["batch", seed].validation - results["layer", seed].validation for seed in seeds]
    in_training = [results["batch", seed].training - results["layer", seed].training for seed in seeds]
    worse = min(behind) > 0 and statistics.mean(behind) >= APART
    return verdict_of(
        worse,
        f"batch normalisation trains worse on text than layer normalisation: "
        f"{'reproduced' if worse else 'not reproduced'} (its validation loss ends "
        f"{statistics.mean(behind):+.3f} nats a token away, {min(behind):+.3f} to {max(behind):+.3f} over "
        f"{len(seeds)} seeds; on training batches {statistics.mean(in_training):+.3f})",
    )


def _losses(ended: Ended) -> str:
    return f"training loss {ended.training:.3f}, validation loss {ended.validation:.3f}"
