"""The claim that a trained decoder's attention rests on the first token, whatever it is (Xiao et al. 2024,
StreamingLLM, section 3.1 and figure 2), on a checkpoint.

A decoder reads rows of held-out text that begin anywhere, so that the first token means nothing; the share of
attention that each layer's heads give it is the mean over the queries from the middle of the row on, which
could look elsewhere. Beside it stands the share of the token that gets most among all others, and fresh
weights, which spread theirs.

The rule, set before any run: in the layers after the second the first token gets `MOST` or more of the
attention in the mean, and in `WIDE` or more of the heads there more than any other place.

Deviations: one checkpoint a hundredth the size of the paper's, shares in place of logits. Seeds are of the
fresh weights; the checkpoint has none.
"""

import dataclasses
import statistics
from pathlib import Path

from torch import Tensor

from polyformer.bench.claims import write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.bench.trained_attention import TRAINED, TrainedAttention
from polyformer.checkpoints import from_pretrained
from polyformer.core.errors import InputError
from polyformer.model import Transformer
from polyformer.visual.spectrum import matrices

MOST, WIDE = 0.3, 0.75
"""Of the attention, on the first token; of the heads, in which no other place gets more."""

BOTTOM = 2
"""Layers at the bottom, of which the paper says that they look nearby."""


EXPERIMENT = Experiment(
    sources={"data": "wikitext2", "model": "decoder"},
    quick={"texts": 1, "length": 16, "seeds": (0,)},
    claims=(
        Claim(
            name="sinks",
            says="beyond the bottom two layers a trained decoder's attention rests on the first token",
            paper="Xiao et al. 2024 (StreamingLLM)",
            section="section 3.1, figure 2",
            published="mean attention logits of Llama-2-7B over 256 sentences of 16 tokens: the first token "
            "stands out in every layer and head beyond the second layer",
            measured="share of attention on the first token of rows that begin anywhere, by layer, beside "
            "fresh weights",
            scale="one decoder, 8 rows of 256 tokens",
            rule="after the second layer the first token gets 0.3 or more of the attention in the mean, and "
            "in three quarters of the heads more than any other place",
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Of one layer, the mean over texts and heads: `first`, the share of the first token; `other`, the
    largest of any other place; and `heads`, the share of the heads in which the first token gets the most."""

    first: float
    other: float
    heads: float


Shares = dict[str, list[Layer]]
"""By layer, of the checkpoint and of fresh weights by seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinksClaim(TrainedAttention):
    """Of a decoder."""

    out: str = "runs/sinks"

    shortest = 4


def run(config: SinksClaim) -> Shares:
    """Measure; write OUT/sinks.csv and .png, print a table and the verdict."""
    folder = Path(config.out)
    model = from_pretrained(config.model)
    if model.decoder is None or model.encoder is not None:
        raise InputError("model: expected a decoder")
    results = config.beside_fresh(model, by_layer)
    cells = [
        (name, number, *dataclasses.astuple(layer))
        for name, own in results.items()
        for number, layer in enumerate(own, 1)
    ]
    write_csv(folder / "sinks.csv", ("weights", "layer", "first", "other", "heads"), cells)
    for name, number, first, other, heads in cells:
        print(f"{name}, layer {number}: first token {first:.3f}, next {other:.3f}, of heads {heads:.2f}")
    curves = {name: [(n, layer.first) for n, layer in enumerate(own, 1)] for name, own in results.items()}
    line_plot(folder / "sinks.png", curves, "layer", "share of attention on the first token")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


def by_layer(model: Transformer, rows: list[Tensor]) -> list[Layer]:
    """What the heads of each layer give the first token, and the largest of the other places."""
    texts = [[shares(layer) for layer in matrices(model, {"input_ids": ids})["decoder"]] for ids in rows]
    return [
        Layer(*(statistics.fmean(values) for values in zip(*own)))
        for own in zip(*texts)  # by layer, over texts
    ]


def shares(weights: Tensor) -> tuple[float, float, float]:
    """(first, other, heads) of one layer's attention [H, n, n], over its later queries."""
    received = weights[:, weights.shape[1] // 2 :].float().mean(1)  # [H, n]
    first, other = received[:, 0], received[:, 1:].max(1).values
    return float(first.mean()), float(other.mean()), float((first > other).float().mean())


def verdict(results: Shares) -> Verdict:
    """What the shares say of the claim."""
    upper = results[TRAINED][BOTTOM:]
    if not upper:
        return Verdict(UNSHOWN, f"no verdict: it needs more than {BOTTOM} layers")
    first, heads = (statistics.fmean(getattr(layer, name) for layer in upper) for name in ("first", "heads"))
    fresh = statistics.fmean(
        layer.first for name, own in results.items() if name != TRAINED for layer in own[BOTTOM:]
    )
    holds = first >= MOST and heads >= WIDE
    said = "reproduced" if holds else "not reproduced"
    return verdict_of(
        holds,
        f"a trained decoder's attention rests on the first token: {said} "
        f"({first:.3f} of it after layer {BOTTOM}, the most in {heads:.0%} of the heads; fresh weights "
        f"{fresh:.3f})",
    )
