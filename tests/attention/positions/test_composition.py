"""Every scheme is its equation: with patterns, left padding, packed documents, caches and grouped heads."""

import dataclasses
import math

import naive_schemes  # noqa: F401 - enters its equations in NAIVE
import pytest
import torch
from naive import NAIVE, Naive, Pair, Sees, attention, randomised
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Global, Pattern, Window
from polyformer.attention.positions import (
    AlibiConfig,
    BoundPosition,
    DebertaConfig,
    Position,
    PositionConfig,
    RopeConfig,
    Shape,
    ShawConfig,
    Site,
    T5BiasConfig,
    TransformerXLConfig,
)
from polyformer.attention.positions.rope_extensions import YarnConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs, Tokens
from registered import examples

ROWS, HEADS, LENGTH, WIDTH, LAYER = 2, 4, 8, 8, 1
SHAPE = Shape(hidden_size=10, num_layers=2, max_positions=64, num_heads=HEADS, head_size=WIDTH)

REGISTERED = {
    kind: member
    for kind, member in PositionConfig.kinds.items()
    if member.__module__.startswith("polyformer.")  # other tests register schemes of their own
}
MORE: dict[str, PositionConfig] = {
    "rope-fast": RopeConfig(base=50.0),
    "rope-pairs": RopeConfig(layout="pairs", fraction=0.8, base=50.0),
    "rope-yarn": RopeConfig(
        base=50.0,
        extension=YarnConfig(factor=4.0, original_max_positions=16, beta_fast=1.5, attention_factor=1.2),
    ),
    "shaw-keys": ShawConfig(clip=2, values=False),
    "transformer_xl-clamped": TransformerXLConfig(clamp_distance=3),
    "t5-few": T5BiasConfig(num_buckets=8, max_distance=16),
    "t5-fewest": T5BiasConfig(num_buckets=4, max_distance=5),
    "deberta-buckets": DebertaConfig(max_relative_positions=7, buckets=8),
    "deberta-near": DebertaConfig(max_relative_positions=3, terms=("c2p",)),
}
"""Options with which a text of a few tokens meets what examples keep for longer ones."""

SCHEMES: dict[str, PositionConfig] = {
    **{
        f"{kind}-{i}": example
        for kind, member in REGISTERED.items()
        for i, example in enumerate(examples(member))
    },
    **MORE,
}


def test_every_registered_scheme_has_a_plain_equation():
    """One compared with itself alone may have any sign wrong: write its equation in naive_schemes.py."""
    assert NAIVE.keys() == REGISTERED.keys()


def near_or_first(i: int, j: int) -> bool:
    return abs(i - j) <= 3 or i < 1 or j < 1


PATTERN = Window(3) | Global(1)
"""Of `near_or_first`."""

LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
PACKED = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1], [0] * 5 + [4] * 3])
SENTENCES = torch.tensor([[0, 0, 0, 0, 1, 2, 0, 1], [0, 1, 0, 1, 1, 2, 2, 0]])
PLACES: dict[str, dict[str, Tensor | None]] = {
    "plain": {"mask": None, "documents": None, "segments": None},
    "padded-packed": {"mask": LEFT, "documents": PACKED, "segments": SENTENCES},
}


def site(layer: int) -> Site:
    """A layer whose own projections of relative embeddings are `projections`."""
    query, key = (
        lambda rows, matrix=matrix: (rows @ matrix).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)
        for matrix in projections()
    )
    return Site(layer, query, key)


def projections() -> tuple[Tensor, Tensor]:
    """Matrices [E, H D] for queries and keys."""
    generator = torch.Generator().manual_seed(3)
    shape = SHAPE.hidden_size, HEADS * WIDTH
    query, key = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    return query, key


def equation(position: Position, config: PositionConfig, layer: int = LAYER) -> Naive:
    return NAIVE[config.kind](position, layer, *projections())


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
    **place: Tensor | None,
) -> Tensor:
    """The mechanism over chunks of the tokens, with a cache where there are several."""
    mechanism = SoftmaxConfig(pattern=pattern).build(HEADS, WIDTH)
    state, tokens, outputs, start = mechanism.new_state(0) if len(split) > 1 else None, NO_TOKENS, [], 0
    for new in split:
        part = slice(start, start + new)
        tokens = extended(tokens, part, **place)
        context = labelled(position, tokens.context(new, causal=causal))
        q, k, v = (x[:, :, part] for x in tensors)
        q, k = position.rotate(q, k, context, site(LAYER))
        y, state = mechanism(q, k, v, context, state, BoundPosition(position, site(LAYER)))
        outputs.append(y)
        start += new
    return torch.cat(outputs, 2)


def extended(
    tokens: Tokens, part: slice, mask: Tensor | None, documents: Tensor | None, segments: Tensor | None
) -> Tokens:
    ids = torch.zeros(ROWS, part.stop - part.start, dtype=torch.long)
    own = [None if tensor is None else tensor[:, part] for tensor in (mask, documents, segments)]
    return tokens.extended(ModelInputs(ids, attention_mask=own[0], document_ids=own[1], segment_ids=own[2]))


def labelled(position: Position, context: Context) -> Context:
    """The same with labels of pairs for a scheme that takes them; some pairs have none."""
    if position.num_relations is None:
        return context
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(-1, position.num_relations, (ROWS, LENGTH, LENGTH), generator=generator)
    last = slice(context.kv_len - context.q_len, context.kv_len)
    return dataclasses.replace(context, relations=labels[:, last, : context.kv_len], memo={})


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_scheme_does_to_inputs_is_its_equation(name: str):
    torch.manual_seed(0)
    position = randomised(SCHEMES[name].build(SHAPE))
    x = torch.randn(2, 40, SHAPE.hidden_size, dtype=torch.float64)
    pos = torch.stack([torch.arange(40), torch.randint(0, 40, (40,))])
    for layer in (0, 1):
        naive = equation(position, SCHEMES[name], layer)
        expected = torch.stack(
            [torch.stack([naive.input(*token) for token in zip(row, at)]) for row, at in zip(x, pos.tolist())]
        )
        torch.testing.assert_close(position.embed(x, pos, layer), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(position.embed(x, pos[0], layer)[0], expected[0], rtol=1e-12, atol=1e-12)


SETTINGS: list[tuple[Pattern | None, Sees | None, str, list[int]]] = [
    (None, None, "padded-packed", [3, 1, 4]),
    (PATTERN, near_or_first, "plain", [3, 1, 4]),
    (PATTERN, near_or_first, "padded-packed", [8]),
]
"""A pattern, a place, and the chunks of tokens: all pairs but the plainest ones."""


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_in_a_decoder_is_its_equation(name: str):
    """Outputs and every gradient; two query heads share a key head."""
    for pattern, sees, place, split in SETTINGS:
        position, tensors = randomised(SCHEMES[name].build(SHAPE)), inputs(kv_heads=2)
        parameters = [*tensors, *position.parameters()]
        actual = run(position, tensors, pattern, split, True, **PLACES[place])
        context = extended(NO_TOKENS, slice(0, LENGTH), **PLACES[place]).context(LENGTH, causal=True)
        context = labelled(position, context)
        expected = attention(equation(position, SCHEMES[name]), *tensors, context, sees)
        same(actual, expected, parameters, PLACES[place]["mask"])


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_in_an_encoder_is_its_equation(name: str):
    """Keys after the query: negative distances, with padding and documents."""
    context = extended(NO_TOKENS, slice(0, LENGTH), **PLACES["padded-packed"]).context(LENGTH, causal=False)
    for pattern, sees in ((None, None), (PATTERN, near_or_first)):
        position, tensors = randomised(SCHEMES[name].build(SHAPE)), inputs(kv_heads=HEADS)
        if position.rotates_parts:
            with pytest.raises(InputError, match="does not work in an encoder; use 'yarn'"):
                run(position, tensors, pattern, [LENGTH], False, **PLACES["padded-packed"])
            continue
        actual = run(position, tensors, pattern, [LENGTH], False, **PLACES["padded-packed"])
        expected = attention(equation(position, SCHEMES[name]), *tensors, labelled(position, context), sees)
        same(actual, expected, [*tensors, *position.parameters()], LEFT)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12])
def test_alibi_has_its_slopes_for_any_number_of_heads(heads: int):
    position = AlibiConfig().build(Shape(hidden_size=4, num_heads=heads, head_size=4))
    naive, zero = NAIVE["alibi"](position, 0), torch.zeros(4, dtype=torch.float64)
    context = Context(3, 3, causal=True)
    x = torch.zeros(1, heads, 3, 4, dtype=torch.float64)
    relative = position.relative(x, x, context, site(0))
    assert relative is not None
    assert relative.bias is not None
    for h in range(heads):
        expected = [float(naive.score(zero, zero, Pair(h, d, 0))) for d in range(3)]
        assert all(map(math.isclose, relative.bias[h].tolist(), expected))


def vanishes(slope: Tensor | None) -> bool:
    """What moves all scores of a query alike has no slope but for rounding."""
    return slope is None or not slope.numel() or float(slope.abs().max()) < 1e-14


def same(actual: Tensor, expected: Tensor, parameters: list[Tensor], mask: Tensor | None) -> None:
    """At the real tokens: what padding says of itself means nothing."""
    if mask is not None:
        actual, expected = (output.transpose(1, 2)[mask.bool()] for output in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weights = torch.arange(actual.numel(), dtype=torch.float64).view(actual.shape).sin()
    slopes = [
        torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True)
        for output in (actual, expected)
    ]
    for mine, other in zip(*slopes, strict=True):
        assert vanishes(mine) == vanishes(other)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
