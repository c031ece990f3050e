"""The claims "orthogonal features err less than independent ones" and "positive ones less than trigonometric
ones" (Choromanski et al. 2021, figure 4), and random feature attention beside them (Peng et al. 2021).

Attention of random normal inputs is estimated with more and more features; the error is the mean square
distance of its output from that of exact softmax attention, over draws. A trigonometric direction gives two
features, and is counted as one, as in the paper. Random feature attention estimates softmax attention of
unit queries and keys, and is measured against that. Where scores are small (`size` 0.5) trigonometric
features err less than positive ones, as lemma 2 has it: these win where kernels are far below 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyformer.attention.linear.feature_attention import linear_attention
from polyformer.attention.linear.feature_maps import MAPS, Kernel
from polyformer.bench.claims import write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.ops.random_directions import directions
from polyformer.sequence.context import Context
from polyformer.training.config import at_least

CURVES = {
    f"{rows} {name}": (name, rows == "orthogonal")
    for name in ("positive", "trigonometric", "gaussian")
    for rows in ("independent", "orthogonal")
}
"""Map and orthogonality of every curve; "gaussian" is random feature attention."""

FLOOR = 0.01
"""Of denominators that trigonometric features estimate below, as a share of the sum of weights."""

Curves = dict[str, list[tuple[int, float]]]


EXPERIMENT = Experiment(
    quick={"length": 24, "width": 4, "draws": 2, "features": (4, 8)},
    claims=(
        Claim(
            name="random-features",
            says="orthogonal features err less than independent ones, positive ones less than "
            "trigonometric ones",
            paper="Choromanski et al. 2021 (Performer); Peng et al. 2021 (RFA)",
            section="figure 4; section 3",
            published="mean square error of attention, 4,096 tokens of width 16, 15 draws: orthogonal "
            "below independent, positive below trigonometric",
            measured="the same error of every map, by the number of features",
            scale="512 tokens of width 16, 15 draws",
            rule="in the mean over numbers of features (log scale): all three orthogonal maps below "
            "their independent ones, positive below trigonometric",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class RandomFeaturesClaim(Config):
    """Sizes of the measurement; those of the paper are 4096 tokens, width 16 and 15 draws."""

    length: int = 512
    width: int = 16
    draws: int = 15
    size: float = 1.0  # standard deviation of the queries' and keys' entries
    features: tuple[int, ...] = (16, 32, 64, 128, 256)
    seed: int = 0
    out: str = "runs/random-features"

    def __post_init__(self) -> None:
        at_least(1, length=self.length, width=self.width, draws=self.draws)
        if len(self.features) < 2 or min(self.features) < 1:
            raise InputError(f"features: expected two numbers of 1 or more, got {list(self.features)}")


def run(config: RandomFeaturesClaim) -> Curves:
    """Measure every curve, write OUT/random_features.csv and .png, print the table and the verdict."""
    curves = {name: list(_curve(config, *choice)) for name, choice in CURVES.items()}
    folder = Path(config.out)
    rows = ((count, name, error) for name, points in curves.items() for count, error in points)
    write_csv(folder / "random_features.csv", ("features", "curve", "mean_square_error"), rows)
    line_plot(folder / "random_features.png", curves, "features", "mean square error", log=True)
    for name, points in curves.items():
        print(f"{name:<28}" + "".join(f"{error:>11.3g}" for _, error in points))
    print(f"curves: {folder / 'random_features.png'}")
    conclude(EXPERIMENT, config, [verdict(curves)])
    return curves


def _curve(config: RandomFeaturesClaim, name: str, orthogonal: bool) -> Iterator[tuple[int, float]]:
    """(features, error) of one map; all maps meet the same inputs, and the same draws of one size."""
    for count in config.features:
        errors = [_error(config, name, orthogonal, count, draw) for draw in range(config.draws)]
        yield count, sum(errors) / len(errors)


def _error(config: RandomFeaturesClaim, name: str, orthogonal: bool, count: int, draw: int) -> float:
    generator = torch.Generator().manual_seed(config.seed + 1000 * draw)
    shape = 1, 1, config.length, config.width
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    if name == "gaussian":
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    else:
        q, k = (x * config.size * config.width**-0.25 for x in (q, k))
    kernel = Kernel(MAPS[name], directions(count, config.width, orthogonal, generator), FLOOR)
    estimate, _ = linear_attention(q, k, v, kernel, Context(config.length, config.length))
    return float((estimate - _exact(q, k, v)).square().mean())


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


def slope(points: list[tuple[int, float]]) -> float:
    """Of log error over log features, from the first to the last."""
    (few, much), (many, little) = points[0], points[-1]
    return math.log(little / much) / math.log(many / few)


def slopes(curves: Curves) -> str:
    """Of the curves with orthogonal directions; -1 is that of a mean of independent draws."""
    own = {name: points for name, points in curves.items() if name.startswith("orthogonal")}
    return ", ".join(f"{slope(points):.2f} {name.split()[1]}" for name, points in own.items())


def verdict(curves: Curves) -> Verdict:
    """What the curves say of the claims, by means over all numbers of features on a log scale."""
    mean = {
        name: sum(math.log(error) for _, error in points) / len(points) for name, points in curves.items()
    }
    parts = []
    for name in ("positive", "trigonometric", "gaussian"):
        ratio = math.exp(mean[f"independent {name}"] - mean[f"orthogonal {name}"])
        parts.append((ratio > 1, f"orthogonal {name} features err {ratio:.2f} times less"))
    ratio = math.exp(mean["orthogonal trigonometric"] - mean["orthogonal positive"])
    parts.append((ratio > 1, f"positive features err {ratio:.2f} times less than trigonometric ones"))
    holds = all(part for part, _ in parts)
    said = "reproduced" if holds else "not reproduced"
    words = "; ".join(part for _, part in parts)
    text = f"orthogonal positive features err least: {said} ({words}; slopes {slopes(curves)})"
    return verdict_of(holds, text)
