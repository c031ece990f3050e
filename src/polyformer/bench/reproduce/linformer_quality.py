"""The claim "k rows are enough" (Wang et al. 2020, section 5.1, figure 3), CPU-sized.

Equal masked language models, dense and Linformer, at equal steps. Validation perplexity against the steps:
(a) with k rows for inputs of n tokens, (b) with the projections shared in every way, (c) with k kept while n
grows. The claims hold where Linformer with the greatest k, and with one matrix for all layers, come near the
dense model and the unshared one, and where n grows without harm.

Deviations: WikiText-2 (or the default text) in place of 3300M words, hundreds of steps in place of 250 000.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyformer.attention import LinformerConfig
from polyformer.bench.claims import TINY, encoder_options, taken_up, wikitext, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.recipes import Recipe
from polyformer.training.config import at_least
from polyformer.training.curves import series
from polyformer.training.metrics import read_metrics

NEAR = 1.05
"""Perplexity over that of the model compared with: at most so much counts as near it."""

FIGURES = {
    "k": "perplexity against k",
    "sharing": "perplexity against what is shared",
    "length": "perplexity against n, with one k",
}


EXPERIMENT = Experiment(
    sources={"data": "wikitext2"},
    quick={
        **TINY,
        "length": 16,
        "ks": (4, 8),
        "k": 4,
        "lengths": (16, 32),
    },
    claims=(
        Claim(
            name="linformer-rows",
            says="k rows are enough, and more are better",
            paper="Wang et al. 2020 (Linformer)",
            section="section 5.1, figure 3a and b",
            published="3,300M words: k = 128 for n = 512 and k = 256 for n = 1,024 are nearly on par with "
            "dense",
            measured="validation perplexity with k = 16 to 128 rows beside dense",
            scale="masked models of WikiText-2, 2 layers of 128, n = 256, hundreds of steps",
            rule="it does not rise with k by more than 1 %, and the greatest k is within 1.05 of dense",
        ),
        Claim(
            name="linformer-sharing",
            says="one projection for all layers is as good as none shared",
            paper="Wang et al. 2020 (Linformer)",
            section="section 5.1, figure 3c",
            published="perplexity curves with none, head-wise, key-value and layer-wise sharing nearly "
            "coincide",
            measured="validation perplexity with every kind of sharing",
            scale="masked models of WikiText-2, 2 layers of 128, n = 256, hundreds of steps",
            rule="one matrix for all layers within 1.05 of none shared",
        ),
        Claim(
            name="linformer-length",
            says="k need not grow with n",
            paper="Wang et al. 2020 (Linformer)",
            section="section 5.1, figure 3d",
            published="with k = 256 perplexity at n = 512 to 4,096 converges to about the same",
            measured="validation perplexity over dense attention's at several n, with one k",
            scale="masked models of WikiText-2, 2 layers of 128, n = 256, hundreds of steps",
            rule="at the greatest n at most 1.05 times that at the least",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityClaim(Config):
    """Sizes of the runs, equal but for the attention; a second call goes on with what OUT holds."""

    data: str | None = (
        None  # a directory with WikiText-2's {train,valid}.txt[.gz]; by default the default text
    )
    length: int = 256  # n
    ks: tuple[int, ...] = (16, 32, 64, 128)
    k: int = 64  # where sharing or n are compared
    sharing: tuple[str, ...] = ("none", "head", "key-value", "layer")
    lengths: tuple[int, ...] = (128, 256, 512)
    steps: int = 2000
    batch_tokens: int = 4096
    layers: int = 2
    width: int = 128
    heads: int = 4
    vocabulary: int = 2000
    lr: float = 2e-3
    seed: int = 0
    out: str = "runs/linformer-quality"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, layers=self.layers, width=self.width, heads=self.heads, k=self.k)
        if self.length not in self.lengths:
            raise InputError(f"lengths: expected {self.length}, the length of the other runs, among them")
        for k in (*self.ks, self.k):
            if not 1 <= k <= min(self.length, *self.lengths):
                raise InputError(f"k: expected 1 to {min(self.length, *self.lengths)} rows, got {k}")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: `k` rows (None: dense attention) for inputs of `length`."""

    length: int
    k: int | None = None
    sharing: str = "head"

    @property
    def name(self) -> str:
        """The folder of its run."""
        return f"n{self.length}-" + ("dense" if self.k is None else f"k{self.k}-{self.sharing}")


Curve = list[tuple[float, float]]
"""Validation perplexity after so many steps."""


def trials(config: QualityClaim) -> dict[str, list[Trial]]:
    """The runs of each part of the figure; some stand in several."""
    dense, n = Trial(config.length), config.length
    return {
        "k": [dense, *(Trial(n, k) for k in config.ks)],
        "sharing": [Trial(n, config.k, sharing) for sharing in config.sharing],
        "length": [trial for m in config.lengths for trial in (Trial(m), Trial(m, config.k))],
    }


def run(config: QualityClaim) -> dict[Trial, Curve]:
    """Train all, write OUT/linformer_quality.csv and a picture of each part, print the table and verdicts."""
    folder, results = Path(config.out), {}
    parts = trials(config)
    for trial in dict.fromkeys(trial for part in parts.values() for trial in part):
        results[trial] = _curve(Recipe.from_dict(recipe(config, trial)), folder / trial.name)
        print(f"{trial.name}: perplexity {results[trial][-1][1]:.2f}", flush=True)
        columns = "length", "k", "sharing", "step", "perplexity"
        write_csv(folder / "linformer_quality.csv", columns, _rows(results))
    last = {trial: curve[-1][1] for trial, curve in results.items()}
    for part, own in parts.items():
        path = folder / f"{part}.png"
        line_plot(
            path, {trial.name: results[trial] for trial in own}, "steps", "validation perplexity", log=True
        )
        print(f"{FIGURES[part]}: {path}")
    conclude(EXPERIMENT, config, verdicts(config, last))
    return results


def recipe(config: QualityClaim, trial: Trial) -> dict[str, Any]:
    """One of the runs."""
    mechanism: dict[str, Any] = {"kind": "softmax"}
    if trial.k is not None:
        mechanism = LinformerConfig(max_length=trial.length, k=trial.k, sharing=trial.sharing).to_dict()
    return {
        "task": {
            "kind": "mlm",
            "row_length": trial.length,
            "batch_tokens": config.batch_tokens,
            "packed": False,
        },
        "model": encoder_options(config, dropout=0.0, encoder={"attention": {"mechanism": mechanism}}),
        "data": wikitext(config.data),
        "tokenizer": {"algorithm": "bpe", "vocab_size": config.vocabulary},
        "optimizer": {"kind": "adamw", "lr": config.lr},
        "schedule": {"kind": "cosine", "warmup": min(100, config.steps)},
        "training": {
            "steps": config.steps,
            "reporting": {"log_every": 50, "evaluate_every": max(1, config.steps // 8)},
            "saving": {"checkpoint_every": 500},
        },
        "seed": config.seed,
    }


def verdicts(config: QualityClaim, results: dict[Trial, float]) -> Iterator[Verdict | None]:
    """What the perplexities at the end say of each claim; None where its runs were left out."""
    n, last = config.length, max(config.ks)
    dense = results[Trial(n)]
    ratios = [results[Trial(n, k)] / dense for k in sorted(config.ks)]
    figures = ", ".join(f"k={k} x{ratio:.3f}" for k, ratio in zip(sorted(config.ks), ratios))
    rising = all(b <= a * 1.01 for a, b in itertools.pairwise(ratios))
    yield _verdict(
        f"more rows are better, and {last} of {n} come near dense", rising and ratios[-1] <= NEAR, figures
    )
    if {"none", "layer"} <= set(config.sharing):
        ratio = results[Trial(n, config.k, "layer")] / results[Trial(n, config.k, "none")]
        yield _verdict("one matrix for all layers is as good as none shared", ratio <= NEAR, f"x{ratio:.3f}")
    else:
        yield None
    grown = [results[Trial(m, config.k)] / results[Trial(m)] for m in sorted(config.lengths)]
    figures = ", ".join(f"n={m} x{ratio:.3f}" for m, ratio in zip(sorted(config.lengths), grown))
    yield _verdict(
        f"k={config.k} serves longer inputs as well", grown[-1] <= grown[0] * NEAR, f"{figures} of dense"
    )


def _verdict(says: str, holds: bool, figures: str) -> Verdict:
    return verdict_of(holds, f"{says}: {'reproduced' if holds else 'not reproduced'} ({figures})")


def _curve(recipe: Recipe, folder: Path) -> Curve:
    """The run in `folder`, made or gone on with, as validation perplexity by step."""
    fitted = taken_up(recipe, folder)
    last = recipe.training.steps, fitted.scores["validation"]["perplexity"]
    points = zip(*series(read_metrics(folder), "valid_perplexity"))
    return [(step, value) for step, value in points if step < last[0]] + [last]


def _rows(results: dict[Trial, Curve]) -> Iterator[tuple[object, ...]]:
    for trial, curve in results.items():
        for point in curve:
            yield trial.length, trial.k or "dense", trial.sharing if trial.k else "", *point
