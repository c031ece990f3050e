"""The claim that self-attention is of low rank, more so in upper layers (Wang et al. 2020, Linformer, section
3 and figure 1), on a checkpoint.

A trained encoder reads held-out text in rows; of every layer's and head's attention matrix [n, n] the
greatest n / 4 singular values hold a share of the sum of all. Beside it stand fresh weights of the same
shape: what the shape alone gives.

The rule, set before any run: the mean share over layers, heads and rows is `MOST` or more, above that of
fresh weights, and in the upper half of the layers above that in the lower half.

Deviations: one checkpoint in place of RoBERTa-base and -large, and texts of `length` tokens, by default
half of the paper's 512. Seeds are of the fresh weights; the checkpoint has none.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from torch import Tensor

from polyformer.bench.claims import write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.bench.trained_attention import TRAINED, TrainedAttention
from polyformer.checkpoints import from_pretrained
from polyformer.core.errors import InputError
from polyformer.model import Transformer
from polyformer.visual.spectrum import LEAST, spectra

MOST = 0.9
"""Of the sum of all singular values, in the greatest quarter."""

EXPERIMENT = Experiment(
    sources={"data": "wikitext2", "model": "encoder"},
    quick={"texts": 1, "length": 16, "seeds": (0,)},
    claims=(
        Claim(
            name="low-rank",
            says="trained self-attention is of low rank, more so in upper layers",
            paper="Wang et al. 2020 (Linformer)",
            section="section 3, figure 1",
            published="normalised cumulative singular values of RoBERTa's attention, n = 512: nearly all "
            "in the first 128, more so in upper layers",
            measured="share of the greatest quarter of singular values by layer, beside fresh weights",
            scale="one encoder of sentences, 8 texts of 256 tokens",
            rule="the mean share is 0.9 or more, above fresh weights', and higher in the upper half of the "
            "layers than in the lower",
        ),
    ),
)

Shares = dict[str, list[float]]
"""By layer, the mean over heads and texts; of the checkpoint, and of fresh weights by seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankClaim(TrainedAttention):
    """Of an encoder."""

    out: str = "runs/low-rank"

    shortest = LEAST


def run(config: LowRankClaim) -> Shares:
    """Measure; write OUT/low-rank.csv and .png, print a table and the verdict."""
    folder = Path(config.out)
    model = from_pretrained(config.model)
    if model.encoder is None:
        raise InputError("model: expected an encoder; a causal matrix is of full rank whatever it holds")
    results = config.beside_fresh(model, by_layer)
    cells = [(name, layer, x) for name, own in results.items() for layer, x in enumerate(own, 1)]
    write_csv(folder / "low-rank.csv", ("weights", "layer", "share"), cells)
    curves = {name: list(enumerate(map(float, own), 1)) for name, own in results.items()}
    for name, own in results.items():
        print(f"{name:<24}" + "".join(f"{share:>7.3f}" for share in own))
    line_plot(folder / "low-rank.png", curves, "layer", "share of the greatest quarter of singular values")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


def by_layer(model: Transformer, rows: list[Tensor]) -> list[float]:
    """The share of the greatest quarter in each layer, the mean over heads and texts."""
    batches: list[Any] = [{"input_ids": ids} for ids in rows]
    return spectra(model, batches)["encoder"].at_quarter.mean(1).tolist()


def verdict(results: Shares) -> Verdict:
    """What the shares say of the claim."""
    own, fresh = results[TRAINED], [x for name, row in results.items() if name != TRAINED for x in row]
    half = max(1, len(own) // 2)
    lower, upper = statistics.fmean(own[:half]), statistics.fmean(own[-half:])
    mean, random = statistics.fmean(own), statistics.fmean(fresh)
    differs = [
        words
        for holds, words in (
            (mean >= MOST, f"the greatest quarter holds less than {MOST:g}"),
            (mean > random, "fresh weights are of as low a rank"),
            (upper > lower, "upper layers are not of lower rank"),
        )
        if not holds
    ]
    outcome = f"not reproduced: {'; '.join(differs)}" if differs else "reproduced"
    return verdict_of(
        not differs,
        f"trained attention is of low rank: {outcome} (the greatest quarter of singular values holds "
        f"{mean:.3f}, lower layers {lower:.3f}, upper {upper:.3f}; fresh weights {random:.3f})",
    )
