"""Any pattern with any position scheme, length, padding, packing and backend: what is drawn agrees."""

import dataclasses

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from members import assert_same
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import (
    BlockWindow,
    Blockwise,
    Causal,
    Fixed,
    Full,
    Global,
    Pattern,
    PerHead,
    Random,
    Strided,
    Window,
)
from polyformer.attention.positions import BoundPosition, PositionConfig, Shape, Site
from polyformer.attention.positions.rope_extensions import LengthExtensionConfig
from polyformer.core.sequence.context import Context

HEADS, WIDTH = 2, 4

SINGLE = st.one_of(
    st.builds(Window, st.integers(1, 9), st.integers(0, 9), st.integers(1, 4)),
    st.builds(Global, st.integers(1, 3)),
    st.builds(Strided, st.integers(1, 9)),
    st.builds(lambda a, b: Fixed(a, min(a, b)), st.integers(2, 9), st.integers(1, 3)),
    st.builds(BlockWindow, st.integers(2, 9), st.integers(0, 2), st.integers(0, 1)),
    st.builds(Random, st.integers(1, 3), st.integers(2, 9), st.integers(0, 5)),
    st.builds(lambda a, order: Blockwise(a, tuple(order)), st.integers(2, 9), st.permutations(range(3))),
    st.sampled_from([Full(), Causal()]),
)
PATTERN = st.recursive(
    SINGLE,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: PerHead((a, b)), inner, inner),
    ),
    max_leaves=4,
)
SCHEMES = [example for kind in PositionConfig.kinds.values() for example in kind.examples()]


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """Two rows of up to 60 tokens: causal or not, packed or not, padded or not, all as long as their keys."""
    length, causal = draw(st.integers(1, 60)), draw(st.booleans())
    context = Context(length, length, causal=causal)
    if draw(st.booleans()):
        edges = draw(st.lists(st.integers(0, length), max_size=2))
        doc = sum(((torch.arange(length) >= edge).long() for edge in edges), torch.zeros(length).long())
        start = torch.where(doc.diff(prepend=doc[:1] - 1) != 0, torch.arange(length), 0).cummax(0).values
        pos = (torch.arange(length) - start).expand(2, -1)
        both = doc.expand(2, -1)
        return dataclasses.replace(context, memo={}, q_doc=both, kv_doc=both, q_pos=pos, kv_pos=pos)
    left = torch.tensor([[draw(st.integers(0, length))], [draw(st.integers(0, length))]])
    valid = torch.arange(length) >= left
    pos = (valid.long().cumsum(1) - 1).clamp_min(0)
    return dataclasses.replace(context, memo={}, kv_valid=valid, q_pos=pos, kv_pos=pos)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    pattern=PATTERN,
    scheme=st.sampled_from(SCHEMES),
    context=contexts(),
    backend=st.sampled_from(["tiled", "auto"]),
)
def test_whatever_is_composed_agrees(
    pattern: Pattern, scheme: PositionConfig, context: Context, backend: str
) -> None:
    lengthens = isinstance(getattr(scheme, "extension", None), LengthExtensionConfig)
    assume(context.causal or not lengthens)  # refused in an encoder
    torch.manual_seed(0)
    shape = Shape(hidden_size=HEADS * WIDTH, max_positions=64, num_heads=HEADS, head_size=WIDTH)
    position = scheme.build(shape).double().eval()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    tables = torch.randn(2, HEADS * WIDTH, WIDTH * HEADS, dtype=torch.float64)

    def heads(matrix: Tensor, x: Tensor) -> Tensor:
        return (x @ matrix).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)

    site = Site(0, lambda x: heads(tables[0], x), lambda x: heads(tables[1], x))
    length = context.q_len
    inputs = [torch.randn(2, HEADS, length, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, HEADS, length, WIDTH, dtype=torch.float64)
    results = []
    for name in (backend, "definition"):
        mechanism = SoftmaxConfig(pattern=pattern, backend=name).build(HEADS, WIDTH)
        q, k = position.rotate(inputs[0], inputs[1], context, site)
        y, _ = mechanism(q, k, inputs[2], context, None, BoundPosition(position, site))
        learned = [*inputs, *position.parameters()]
        slopes = torch.autograd.grad((y * weight).sum(), learned, allow_unused=True)
        results.append([y, *(torch.zeros(1) if slope is None else slope for slope in slopes)])
    for actual, expected in zip(*results):
        assert_same(actual, expected)
