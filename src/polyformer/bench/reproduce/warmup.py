"""The claim "post-norm needs warm-up, pre-norm does not" (Xiong et al. 2020, section 4), CPU-sized.

Four equal language models of the default text, six layers of 64, with the two wirings and a constant
learning rate reached at once or over a warm-up. The claim holds where post-norm without warm-up ends far
above post-norm with it, while pre-norm ends alike.
"""

import dataclasses
from pathlib import Path
from typing import Any

from polyformer.bench.claims import decoder_options, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.recipes import Recipe
from polyformer.training.config import at_least
from polyformer.training.curves import series
from polyformer.training.metrics import read_metrics

APART, ALIKE = 0.3, 0.1
"""Nats a token: differences of validation loss that count as "far above" and "alike"."""


EXPERIMENT = Experiment(
    quick={"steps": 2, "layers": 1, "width": 16, "warmup": 2},
    claims=(
        Claim(
            name="warmup",
            says="post-norm needs warm-up, pre-norm does not",
            paper="Xiong et al. 2020",
            section="section 4",
            published="IWSLT'14, WMT'14 and BERT: without warm-up post-norm fails, pre-norm trains as "
            "well and faster",
            measured="validation loss of post- and pre-norm decoders, with and without warm-up",
            scale="the default text, 6 layers of 64, 300 steps of Adam at 3e-3",
            rule="without warm-up post-norm ends more than 0.3 nats a token higher than with it, "
            "pre-norm within 0.1",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupClaim(Config):
    """Sizes of the four runs, which a second call goes on with."""

    steps: int = 300
    layers: int = 6
    width: int = 64
    heads: int = 4
    lr: float = 3e-3
    warmup: int = 150  # steps, in the two runs that have one
    seed: int = 0
    out: str = "runs/warmup"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, warmup=self.warmup)
        at_least(1, layers=self.layers, width=self.width, heads=self.heads)


def run(config: WarmupClaim) -> dict[tuple[str, bool], float]:
    """Train all four, write OUT/warmup.csv and OUT/warmup.png, print the verdict; return the final losses."""
    losses: dict[str, list[tuple[float, float]]] = {}
    final: dict[tuple[str, bool], float] = {}
    for block in ("post", "pre"):
        for warm in (False, True):
            name = f"{block}-norm, {'with' if warm else 'no'} warm-up"
            out = Path(config.out) / f"{block}-{'warm' if warm else 'cold'}"
            fitted = taken_up(Recipe.from_dict(recipe(config, block, warm)), out)
            rows = read_metrics(out)
            losses[name] = list(zip(*series(rows, "loss")))
            final[block, warm] = fitted.scores["validation"]["loss"]
    folder = Path(config.out)
    rows = ((name, *point) for name, points in losses.items() for point in points)
    write_csv(folder / "warmup.csv", ("run", "step", "loss"), rows)
    line_plot(folder / "warmup.png", losses, "step", "training loss, nats a token")
    for (block, warm), loss in final.items():
        print(f"{block}-norm {'with' if warm else 'without'} warm-up: validation loss {loss:.3f}")
    print(f"curves: {folder / 'warmup.png'}")
    conclude(EXPERIMENT, config, [verdict(final)])
    return final


def recipe(config: WarmupClaim, block: str, warm: bool) -> dict[str, Any]:
    """One of the four runs."""
    return {
        "task": {"kind": "lm", "row_length": 128, "batch_tokens": 2048},
        "model": decoder_options(config, block=block, dropout=0.0, initializer_range=None),
        "tokenizer": {"algorithm": "bpe", "vocab_size": 512},
        "optimizer": {"kind": "adam", "lr": config.lr},
        "schedule": {"kind": "constant", "warmup": config.warmup if warm else 0},
        "training": {
            "steps": config.steps,
            "clip": None,
            "reporting": {"log_every": 10, "evaluate_every": config.steps},
            "saving": {"checkpoint_every": config.steps},
        },
        "seed": config.seed,
    }


def verdict(final: dict[tuple[str, bool], float]) -> Verdict:
    """What the four validation losses say of the claim."""
    post, pre = (final[block, False] - final[block, True] for block in ("post", "pre"))
    holds = post > APART and abs(pre) < ALIKE
    said = "reproduced" if holds else "not reproduced"
    return verdict_of(
        holds,
        f"post-norm needs warm-up, pre-norm does not: {said} (without warm-up the loss ends {post:+.3f} "
        f"nats a token for post-norm, {pre:+.3f} for pre-norm)",
    )
