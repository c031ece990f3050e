"""The claim "train short, test long" (Press et al. 2022, sections 2 to 4, figure 1), CPU-sized.

Equal language models, each with another position scheme, are trained on rows of 128 tokens and read longer
ones: perplexity of the same held-out text in segments that do not overlap, as in the paper. With ALiBi it
must not rise with the length, with sinusoids it must explode, and T5's biases and rotations lie between.

Deviations: WikiText-2 (or the default text) in place of WikiText-103, a model a thousand times smaller.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.bench.claims import TINY, decoder_options, taken_up, wikitext, write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.model import Transformer
from polyformer.position import PositionConfig
from polyformer.recipes import Recipe
from polyformer.recipes.fit import Fitted
from polyformer.tasks import LanguageModelling
from polyformer.tasks.metrics import exp
from polyformer.training.config import at_least

Found = Mapping[tuple[str, int], float | None]
"""Perplexity by scheme and length; None where the scheme cannot go so far."""

SCHEMES = "sinusoidal", "learned", "rope", "t5", "alibi", "da", "transformer_xl"
ORDER = "alibi", "t5", "rope", "sinusoidal"
"""From the lowest to the highest perplexity far beyond the training length, in the paper's figure 1."""

EXPLODES, HOLDS = 2.0, 1.0
"""Perplexity at the greatest length over that at the training length: at least this for sinusoids, at most
this for ALiBi."""


EXPERIMENT = Experiment(
    sources={"data": "wikitext2"},
    quick={
        **TINY,
        "length": 16,
        "lengths": (16, 32),
        "held_out": 300,
    },
    claims=(
        Claim(
            name="extrapolation",
            says="train short, test long: with ALiBi perplexity does not rise beyond the training "
            "length, with sinusoids it explodes",
            paper="Press et al. 2022 (ALiBi)",
            section="sections 2 to 4, figure 1",
            published="WikiText-103, trained at 512 and 1,024: ALiBi improves to 3,072, T5's biases and "
            "rotations degrade in between, sinusoids explode",
            measured="perplexity of one text in segments of 128 to 2,048 tokens, trained at 128",
            scale="WikiText-2, 4 layers of 128, 600 steps of 1,024 tokens",
            rule="at 2,048 tokens over 128: ALiBi at most 1, sinusoids 2 or more, and the paper's "
            "order of the four",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtrapolationClaim(Config):
    """Sizes of the runs, equal but for the scheme; a second call goes on with what OUT holds."""

    data: str | None = (
        None  # a directory with WikiText-2's {train,valid}.txt[.gz]; by default the default text
    )
    schemes: tuple[str, ...] = SCHEMES
    length: int = 128  # tokens in a training row
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)  # tokens in a segment, in evaluation
    held_out: int = 100_000  # tokens evaluated on, at most
    steps: int = 1000
    batch_tokens: int = 2048
    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: int = 2000
    lr: float = 3e-3
    seed: int = 0
    out: str = "runs/extrapolation"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, layers=self.layers, width=self.width, heads=self.heads)
        at_least(2, length=self.length, held_out=self.held_out)
        for scheme in self.schemes:
            if scheme not in PositionConfig.kinds:
                raise unknown("position scheme", scheme, PositionConfig.kinds)
        if not self.lengths or min(self.lengths) < 2:
            raise InputError(f"lengths: expected lengths of 2 or more, got {list(self.lengths)}")


def run(config: ExtrapolationClaim) -> Found:
    """Train and measure every scheme; write OUT/extrapolation.csv and .png, print a table and the verdict."""
    results: dict[tuple[str, int], float | None] = {}
    for scheme in config.schemes:
        fitted = taken_up(Recipe.from_dict(recipe(config, scheme)), Path(config.out) / scheme)
        ids = held_out(fitted, config.held_out)
        for length in config.lengths:
            results[scheme, length] = perplexity(fitted.model, ids, length)
            print(f"{scheme} at {length}: perplexity {_cell(results[scheme, length])}", flush=True)
    folder = Path(config.out)
    rows = ((*key, value) for key, value in results.items())
    write_csv(folder / "extrapolation.csv", ("scheme", "length", "perplexity"), rows)
    print("\n".join(table(results)))
    curves = {
        scheme: [(n, value) for n in config.lengths if (value := results[scheme, n]) is not None]
        for scheme in config.schemes
    }
    line_plot(folder / "extrapolation.png", curves, "tokens in a segment", "perplexity", log=True)
    print(f"curves: {folder / 'extrapolation.png'}")
    conclude(EXPERIMENT, config, [verdict(results, config.length)])
    return results


def recipe(config: ExtrapolationClaim, scheme: str) -> dict[str, Any]:
    """The run of one scheme."""
    return {
        "task": {"kind": "lm", "row_length": config.length, "batch_tokens": config.batch_tokens},
        "model": decoder_options(
            config, position=scheme, dropout=0.0, embedding={"scaled": True}, initializer_range=None
        ),
        "data": wikitext(config.data),
        "tokenizer": {"algorithm": "bpe", "vocab_size": config.vocabulary},
        "optimizer": {"kind": "adamw", "lr": config.lr},
        "schedule": {"kind": "cosine", "warmup": min(100, config.steps)},
        "training": {
            "steps": config.steps,
            "reporting": {"log_every": 50, "evaluate_every": config.steps},
            "saving": {"checkpoint_every": 250},
        },
        "seed": config.seed,
    }


def held_out(fitted: Fitted, most: int) -> Tensor:
    """The first `most` tokens of the validation text as one stream, [N]."""
    assert isinstance(fitted.task, LanguageModelling)
    assert fitted.splits.validation is not None
    documents = fitted.task.documents(list(fitted.splits.validation))
    return torch.tensor(list(itertools.islice(itertools.chain.from_iterable(documents), most)))


@torch.no_grad()
def perplexity(model: Transformer, ids: Tensor, length: int) -> float | None:
    """exp of the mean nats over all `ids` [N] but the first; None for more tokens than there are positions.

    Read in segments of `length` tokens, each of which begins with the last token of the one before: every
    token is predicted once, and from at most length - 1 others.
    """
    assert model.decoder is not None
    limit = model.decoder.position.max_positions
    if limit is not None and length > limit:
        return None
    model.eval()
    nats = 0.0
    for batch in _segments(ids.to(next(model.parameters()).device), length):
        nats += float(model(input_ids=batch, labels=batch).loss) * batch[:, 1:].numel()
    return exp(nats / (len(ids) - 1))


def _segments(ids: Tensor, length: int, batch_tokens: int = 4096) -> Iterator[Tensor]:
    """Batches of whole segments [B, length], then what is left [1, R]."""
    whole = ids.unfold(0, length, length - 1) if len(ids) >= length else ids.new_empty(0, length)
    if len(whole):
        yield from whole.split(max(1, batch_tokens // length))
    rest = ids[len(whole) * (length - 1) :]
    if len(rest) > 1:
        yield rest.unsqueeze(0)


def table(results: Found) -> list[str]:
    """Lines of text: a row for each scheme, a column for each length."""
    schemes, lengths = dict.fromkeys(scheme for scheme, _ in results), dict.fromkeys(n for _, n in results)
    rows = ["perplexity".ljust(16) + "".join(f"{n:>10}" for n in lengths)]
    for scheme in schemes:
        rows.append(scheme.ljust(16) + "".join(f"{_cell(results[scheme, n]):>10}" for n in lengths))
    if None in results.values():
        rows.append("-: longer than the learned positions, which end with the training length")
    return rows


def verdict(results: Found, trained: int) -> Verdict:
    """What the figures say of the claim, and where they differ from the paper's."""
    last = max(length for _, length in results)
    absent = [scheme for scheme in ORDER if (scheme, trained) not in results]
    if absent or last <= trained:
        needs = f"{', '.join(ORDER)}, at {trained} tokens and beyond"
        return Verdict(UNSHOWN, f"no verdict: it needs {needs}")
    ratio = {scheme: (results[scheme, last] or 0.0) / (results[scheme, trained] or 1.0) for scheme in ORDER}
    order = sorted(ORDER, key=lambda scheme: results[scheme, last] or 0.0)
    differs = []
    if ratio["alibi"] > HOLDS:
        differs.append("ALiBi does not hold")
    if ratio["sinusoidal"] < EXPLODES:
        differs.append("sinusoids do not explode")
    if tuple(order) != ORDER:
        differs.append(f"the order at {last} is {' < '.join(order)} (the paper's: {' < '.join(ORDER)})")
    grown = ", ".join(f"{scheme} x{value:.2f}" for scheme, value in ratio.items())
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    text = f"train short, test long: {outcome} (perplexity from {trained} to {last} tokens: {grown})"
    return verdict_of(not differs, text)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
