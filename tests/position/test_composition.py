"""Every scheme in every place: patterns, left padding, packed documents, caches, grouped heads."""

from typing import ClassVar

import pytest
import torch
from naive import (
    SITE,
    Naive,
    NaiveDistanceAware,
    NaiveRope,
    NaiveShaw,
    NaiveTransformerXL,
    attention,
    randomised,
)
from torch import Tensor

from polyformer.attention import SoftmaxConfig
from polyformer.patterns import Global, Pattern, Window
from polyformer.position import (
    AlibiConfig,
    DistanceAwareConfig,
    Position,
    PositionConfig,
    RopeConfig,
    Shape,
    ShawConfig,
    T5BiasConfig,
    Terms,
    TransformerXLConfig,
)
from polyformer.sequence.tokens import NO_TOKENS, Tokens

ROWS, HEADS, LENGTH, WIDTH, LAYER = 2, 4, 8, 6, 1
SHAPE = Shape(hidden_size=10, num_layers=2, num_heads=HEADS, head_size=WIDTH)


class NaiveAlibi(Naive):
    def score(self, h: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return super().score(h, q, k, i, j) - 2 ** (-8 * (h + 1) / HEADS) * abs(i - j)


class NaiveT5(Naive):
    """With 8 buckets up to distance 16: the ones of a causal stack by hand, 4 of them one by one."""

    causal: ClassVar[dict[int, int]] = {**{d: d for d in range(4)}, 4: 4, 5: 4, 6: 5, 7: 5}

    def score(self, h: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return super().score(h, q, k, i, j) + self.position.table.weight[self.causal[i - j], h]


SCHEMES: dict[str, tuple[PositionConfig, type[Naive]]] = {
    "rope": (RopeConfig(base=50.0), NaiveRope),
    "rope-pairs": (RopeConfig(layout="pairs", fraction=0.67, base=50.0), NaiveRope),
    "shaw": (ShawConfig(clip=2), NaiveShaw),
    "shaw-keys": (ShawConfig(clip=3, values=False), NaiveShaw),
    "transformer_xl": (TransformerXLConfig(), NaiveTransformerXL),
    "transformer_xl-shared": (TransformerXLConfig(shared_biases=True, clamp_distance=3), NaiveTransformerXL),
    "da": (DistanceAwareConfig(), NaiveDistanceAware),
    "alibi": (AlibiConfig(), NaiveAlibi),
    "t5": (T5BiasConfig(num_buckets=8, max_distance=16), NaiveT5),
}
PATTERNS = [pytest.param(one, id=str(one and one.to_text())) for one in (None, Window(3) | Global(1))]

LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
PACKED = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1], [0] * 5 + [4] * 3])
PLACES: dict[str, dict[str, Tensor | None]] = {
    "plain": {"mask": None, "documents": None},
    "padded-packed": {"mask": LEFT, "documents": PACKED},
}


def inputs(kv_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    heads = HEADS, kv_heads, kv_heads
    return [torch.randn(ROWS, n, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True) for n in heads]


def run(
    position: Position,
    tensors: list[Tensor],
    pattern: Pattern | None,
    split: list[int],
    causal: bool,
    mask: Tensor | None,
    documents: Tensor | None,
) -> Tensor:
    """The mechanism over chunks of the tokens, with a cache where there are several."""
    mechanism = SoftmaxConfig(pattern=pattern).build(HEADS, WIDTH)
    state, tokens, outputs, start = mechanism.new_state(0) if len(split) > 1 else None, NO_TOKENS, [], 0
    for new in split:
        part = slice(start, start + new)
        tokens = extended(tokens, part, mask, documents)
        context = tokens.context(new, causal=causal)
        q, k, v = (x[:, :, part] for x in tensors)
        q, k = position.rotate(q, k, context, SITE[LAYER])
        y, state = mechanism(q, k, v, context, state, Terms(position, SITE[LAYER]))
        outputs.append(y)
        start += new
    return torch.cat(outputs, 2)


def extended(tokens: Tokens, part: slice, mask: Tensor | None, documents: Tensor | None) -> Tokens:
    ids = torch.zeros(ROWS, part.stop - part.start, dtype=torch.long)
    own = [None if one is None else one[:, part] for one in (mask, documents)]
    return tokens.extended(ids, own[0], None, own[1])


@pytest.mark.parametrize("split", [[8], [3, 1, 4]], ids=["whole", "chunks"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_in_a_decoder_is_its_equation(
    name: str, pattern: Pattern | None, place: str, split: list[int]
):
    """Outputs and every gradient; two query heads share a key head."""
    config, kind = SCHEMES[name]
    position, tensors = randomised(config.build(SHAPE)), inputs(kv_heads=2)
    parameters = [*tensors, *position.parameters()]
    actual = run(position, tensors, pattern, split, True, **PLACES[place])
    context = extended(NO_TOKENS, slice(0, LENGTH), **PLACES[place]).context(LENGTH, causal=True)
    expected = attention(kind(position, LAYER), *tensors, context, pattern)
    same(actual, expected, parameters, PLACES[place]["mask"])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "t5"])  # its buckets are tested apart
def test_a_scheme_in_an_encoder_is_its_equation(name: str, pattern: Pattern | None):
    """Keys after the query: negative distances, with padding and documents."""
    config, kind = SCHEMES[name]
    position, tensors = randomised(config.build(SHAPE)), inputs(kv_heads=HEADS)
    actual = run(position, tensors, pattern, [LENGTH], False, **PLACES["padded-packed"])
    context = extended(NO_TOKENS, slice(0, LENGTH), **PLACES["padded-packed"]).context(LENGTH, causal=False)
    expected = attention(kind(position, LAYER), *tensors, context, pattern)
    same(actual, expected, [*tensors, *position.parameters()], LEFT)


def same(actual: Tensor, expected: Tensor, parameters: list[Tensor], mask: Tensor | None) -> None:
    """At the real tokens: what padding says of itself means nothing."""
    if mask is not None:
        actual, expected = (one.transpose(1, 2)[mask.bool()] for one in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weights = torch.arange(actual.numel(), dtype=torch.float64).view(actual.shape).sin()
    slopes = [
        torch.autograd.grad((one * weights).sum(), parameters, allow_unused=True)
        for one in (actual, expected)
    ]
    for mine, other in zip(*slopes, strict=True):
        assert (mine is None or not mine.any()) == (other is None or not other.any())
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
