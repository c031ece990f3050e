"""The error of attention estimated by random features (Choromanski et al. 2021, figure 4; Peng et al.
2021).
"""

import statistics
from collections.abc import Iterator, Sequence

import torch

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.linear.feature_attention import linear_attention
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.attention.mechanisms.random_directions import directions
from polyformer.core.sequence.context import Context
from polyformer_lab.cells import Cell, Row, measurement

FLOOR = 0.01
"""The lower bound of the denominators estimated by trigonometric features, as a share of the weights' sum."""


@measurement("features")
def feature_errors(
    cell: Cell,
    map: str,
    orthogonal: bool,
    features: Sequence[int],
    length: int,
    width: int,
    draws: int,
    size: float,
) -> Iterator[Row]:
    """Yield the mean square error of the attention of random inputs by the number of features.

    The last row has the geometric mean over the numbers of features.

    Args:
        cell: its seed is the seed of inputs and directions, which are the same for all maps.
        map: the feature map; "gaussian" estimates attention of unit queries and keys.
        orthogonal: whether the directions are orthogonal.
        features: the numbers of directions.
        length: tokens.
        width: the head dimension.
        draws: the number of draws over which the error is averaged.
        size: standard deviation of the entries of queries and keys.
    """
    errors = {}
    for count in features:
        seeds = [(cell.seed or 0) + 1000 * draw for draw in range(draws)]
        own = [_error(map, orthogonal, count, length, width, size, seed) for seed in seeds]
        errors[count] = statistics.fmean(own)
        yield {"features": count, "error": errors[count]}
    yield {"mean_error": statistics.geometric_mean(errors.values())}


def _error(map: str, orthogonal: bool, count: int, length: int, width: int, size: float, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    shape = 1, 1, length, width
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    if map == "gaussian":
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    else:
        q, k = (x * size * width**-0.25 for x in (q, k))
    kernel = Kernel(MAPS[map], directions(count, width, orthogonal, generator), FLOOR)
    estimate, _ = linear_attention(Heads(q, k, v), kernel, Context(length, length))
    return float((estimate - torch.softmax(q @ k.mT, -1) @ v).square().mean())
