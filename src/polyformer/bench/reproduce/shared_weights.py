"""Two claims on weights that serve twice: tying the output matrix to the token table lowers perplexity (Press
and Wolf 2017, sections 3 and 4, table 3), and sharing the weights of all layers costs little (Lan et al.
2020, ALBERT, section 4.5, table 4), CPU-sized.

Equal decoders with the same batches, steps and learning rate, by seed: tied, with an output matrix of its
own, and tied with one layer's weights for all layers. Compared are losses of the validation text.

The rules, set before any run. Tying: its loss is the lower with every seed. Sharing: in the mean its loss
is at most `LITTLE` above that of layers of their own, with at most `FEWER` of the parameters beside the
token table.

Deviations: WikiText-2 (or the default text) in place of Penn Treebank, Transformers in place of LSTMs for
the first; a decoder of some layers and hundreds of steps in place of BERT for the second.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyformer.bench.claims import small_recipe, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.recipes import Recipe
from polyformer.training.config import at_least
from polyformer.training.curves import series
from polyformer.training.metrics import read_metrics

LITTLE, FEWER = 0.1, 0.5
"""Nats a token that sharing may cost, and the share of the layers' parameters that it may keep."""

TIED, UNTIED, SHARED = "tied", "an output matrix of its own", "tied, layers shared"

VARIANTS: dict[str, dict[str, Any]] = {
    TIED: {},
    UNTIED: {"tied": False},
    SHARED: {"num_hidden_groups": 1},
}

SCALE = "WikiText-2, decoders of 4 layers of 64, vocabulary 2,000, 300 steps of 1,024 tokens, three seeds"

EXPERIMENT = Experiment(
    sources={"data": "wikitext2"},
    quick={"seeds": (0,), "steps": 2, "layers": 2, "width": 16, "heads": 2, "vocabulary": 300, "length": 16},
    claims=(
        Claim(
            name="weight-tying",
            says="tying the output matrix to the token table lowers perplexity",
            paper="Press and Wolf 2017",
            section="sections 3 and 4, table 3",
            published="lower perplexity of LSTMs on Penn Treebank and other texts, with fewer parameters",
            measured="validation loss of equal decoders, tied and not",
            scale=SCALE,
            rule="the tied one's loss is the lower with every seed",
        ),
        Claim(
            name="layer-sharing",
            says="sharing the weights of all layers costs little",
            paper="Lan et al. 2020 (ALBERT)",
            section="section 4.5, table 4",
            published="mean of five tasks, E = 128: 81.6 with layers of their own (89M), 80.1 shared (12M)",
            measured="validation loss of equal decoders, with one layer's weights for all and with each its "
            "own",
            scale=SCALE,
            rule="in the mean at most 0.1 nats a token above, with at most half of the layers' parameters",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedWeightsClaim(Config):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    data: str | None = None  # a directory with WikiText-2's {train,valid}.txt[.gz]; else the default text
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 300
    length: int = 128  # tokens of a row
    batch_tokens: int = 1024
    layers: int = 4
    width: int = 64
    heads: int = 4
    vocabulary: int = 2000
    lr: float = 2e-3
    out: str = "runs/shared-weights"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, width=self.width, heads=self.heads)
        at_least(2, layers=self.layers)
        if not self.seeds:
            raise InputError("seeds: expected one or more")


@dataclasses.dataclass(frozen=True)
class Ended:
    """Validation loss, nats a token; parameters in all, and beside token table and output matrix."""

    loss: float
    parameters: int
    layers: int


Results = Mapping[tuple[str, int], Ended]
"""By variant and seed."""


def run(config: SharedWeightsClaim) -> dict[tuple[str, int], Ended]:
    """Train all; write OUT/shared-weights.csv and .png, print each run and the verdicts."""
    folder, results = Path(config.out), dict[tuple[str, int], Ended]()
    curves: dict[str, list[tuple[float, float]]] = {}
    for seed in config.seeds:
        for number, name in enumerate(VARIANTS):
            place = folder / f"{number}-{seed}"
            fitted = taken_up(Recipe.from_dict(small_recipe(config, seed, **VARIANTS[name])), place)
            sizes = {key: x.numel() for key, x in fitted.model.named_parameters()}
            layers = sum(size for key, size in sizes.items() if "layers" in key)
            results[name, seed] = ended = Ended(
                fitted.scores["validation"]["loss"], sum(sizes.values()), layers
            )
            curves[f"{name}, seed {seed}"] = list(zip(*series(read_metrics(place), "loss")))
            print(f"{name}, seed {seed}: loss {ended.loss:.4f}, {ended.parameters:,} parameters", flush=True)
    rows = ((*key, *dataclasses.astuple(ended)) for key, ended in results.items())
    columns = "variant", "seed", "validation_loss", "parameters", "parameters_of_layers"
    write_csv(folder / "shared-weights.csv", columns, rows)
    line_plot(folder / "shared-weights.png", curves, "step", "training loss, nats a token")
    conclude(EXPERIMENT, config, [tying(results), sharing(results)])
    return results


def behind(results: Results, name: str, other: str) -> list[float]:
    """How far the loss of a variant ends above another's, by seed."""
    return [results[name, seed].loss - results[other, seed].loss for seed in sorted({s for _, s in results})]


def spread(differences: list[float]) -> str:
    """Mean and range in words."""
    mean, least, most = statistics.fmean(differences), min(differences), max(differences)
    return f"{mean:+.3f} nats a token, {least:+.3f} to {most:+.3f} over {len(differences)} seeds"


def tying(results: Results) -> Verdict:
    """What the losses say of the first claim."""
    above = behind(results, TIED, UNTIED)
    holds = max(above) < 0
    said = "reproduced" if holds else "not reproduced"
    return verdict_of(holds, f"tying lowers perplexity: {said} (tied beside untied {spread(above)})")


def sharing(results: Results) -> Verdict:
    """What the losses and sizes say of the second."""
    above, seed = behind(results, SHARED, TIED), next(iter(results))[1]
    part = results[SHARED, seed].layers / results[TIED, seed].layers
    holds = statistics.fmean(above) <= LITTLE and part <= FEWER
    said = "reproduced" if holds else "not reproduced"
    return verdict_of(
        holds,
        f"sharing all layers' weights costs little: {said} ({spread(above)}, {part:.0%} of the layers' "
        "parameters)",
    )
