"""Strided and fixed attention as the paper draws them, and its three integrations."""

import dataclasses

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import (
    BlockWindow,
    Fixed,
    Pattern,
    PerHead,
    PerLayer,
    Strided,
    Summary,
    Window,
)
from polyformer.attention.patterns.layout import count
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig


def mask(pattern: Pattern, context: Context, head: int = 0) -> Tensor:
    """[Tq, Tk] of one head, the context's own limits included for a causal one."""
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.full((1, 1, 1, 1), head)
    q_idx, kv_idx = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    allowed = pattern.mask(context, b, h, q_idx, kv_idx).expand(1, 1, -1, -1)[0, 0]
    return allowed & (q_idx + context.offset >= kv_idx) if context.causal else allowed


def drawn(*rows: str) -> Tensor:
    """A mask from rows of # and . as in the paper's figures."""
    return torch.tensor([[cell == "#" for cell in row] for row in rows])


def test_strided_is_the_papers_figure():
    """Figure 3b with a stride of 3: the last 3 positions before a token, and every third."""
    near, far = Window(3, 0), Strided(3)
    context = Context(8, 8, causal=True)
    assert torch.equal(
        mask(near, context),
        drawn("#.......", "##......", "###.....", "####....", ".####...", "..####..", "...####.", "....####"),
    )
    assert torch.equal(
        mask(far, context),
        drawn("#.......", ".#......", "..#.....", "#..#....", ".#..#...", "..#..#..", "#..#..#.", ".#..#..#"),
    )
    i = torch.arange(8).view(-1, 1)
    j = torch.arange(8)
    equation = ((j >= (i - 3).clamp_min(0)) | ((i - j) % 3 == 0)) & (j <= i)
    assert torch.equal(mask(near | far, context), equation)


def test_fixed_is_the_papers_figure():
    """Figure 3c with a stride of 4 and 1 column: one's own block, and its last column for later ones."""
    context = Context(9, 9, causal=True)
    assert torch.equal(
        mask(Fixed(4, 1), context),
        drawn(
            "#........",
            "##.......",
            "###......",
            "####.....",
            "...##....",
            "...###...",
            "...####..",
            "...#####.",
            "...#...##",
        ),
    )
    assert torch.equal(mask(Fixed(4, 2), context)[8], drawn("..##..###")[0])


def test_without_a_future_to_hide_both_sides_are_seen():
    assert torch.equal(mask(Strided(3), Context(8, 8))[4], drawn(".#..#..#")[0])
    assert torch.equal(mask(Fixed(3, 1), Context(8, 8))[1], drawn("###..#..")[0])


def test_fixed_is_its_two_parts():
    context = Context(37, 41)
    assert torch.equal(mask(Fixed(7, 2), context), mask(BlockWindow(7, 0, 0) | Summary(7, 2), context))


def test_fixed_counts_positions_of_the_document():
    """Left padding and a document before it move no block."""
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5]])
    context = Context(8, 8, q_pos=positions, kv_pos=positions)
    assert torch.equal(mask(Fixed(3, 1), context)[2:, 2:], mask(Fixed(3, 1), Context(6, 6)))
    keys = Fixed(3, 1).keys(context, 5, 8)
    assert keys.some == ((4, 8),)
    assert keys.full == ((4, 8),)


def test_a_row_of_a_layout_lists_only_the_columns_it_needs():
    """Counted in keys, at lengths where a mask of queries times keys could not be made."""
    length = 1 << 16
    context = Context(length, length)
    keys = Fixed(128, 8).keys(context, 640, 768)
    assert count(keys.some) == 128 + 8 * (length // 128 - 1)
    assert keys.full == keys.some
    assert count(Strided(256).keys(context, 640, 704).some) == 64 * length // 256
    assert count(Strided(32).keys(context, 640, 704).some) == length


@pytest.mark.parametrize("near", [Window(3, 0), BlockWindow(4, 0, 0)], ids=str)
def test_the_integrations(near: Pattern):
    """By layer, in one head, by head: what each layer and head sees."""
    far = Strided(3) if isinstance(near, Window) else Summary(4, 1)
    context = Context(13, 13, causal=True)
    a, b = mask(near, context), mask(far, context)
    turns = SoftmaxConfig(pattern=PerLayer((near, far)))
    for layer, expected in enumerate((a, b, a)):
        pattern = turns.for_layer(layer).pattern
        assert pattern is not None
        assert torch.equal(mask(pattern, context), expected)
    assert torch.equal(mask(near | far, context), a | b)
    for head, expected in enumerate((a, b, a)):
        assert torch.equal(mask(PerHead((near, far)), context, head), expected)


PATTERNS = {
    "layers": PerLayer((Window(3, 0), Strided(3))),
    "one-head": Window(3, 0) | Strided(3),
    "heads": PerHead((BlockWindow(4, 0, 0), Summary(4, 2))),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_recomputed_activations_give_the_same_gradients(name: str):
    attention = AttentionConfig(num_attention_heads=2, mechanism=SoftmaxConfig(pattern=PATTERNS[name]))
    stack = StackConfig(num_hidden_layers=3, attention=attention, dropout=0.0)
    ids = torch.randint(11, (2, 19))
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(vocab_size=11, hidden_size=16, decoder=stack)).double().train()
        assert model.decoder is not None
        model.decoder.recompute = recompute
        loss = model(ids, labels=ids).loss
        assert loss is not None
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for plain, recomputed in zip(*results):
        torch.testing.assert_close(plain, recomputed, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pattern", [Strided(5), Strided(100), Fixed(16, 3), Fixed(100, 100)], ids=str)
def test_blocks_agree_with_the_definition(pattern: Pattern):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 201, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, 2, 201, 6, dtype=torch.float64)
    for context in (Context(201, 201), Context(201, 201, causal=True)):
        results = []
        for backend in ("tiled", "definition"):
            fresh = dataclasses.replace(context, memo={})
            out = attend(*inputs, pattern=pattern, context=fresh, backend=backend)
            results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Strided(0), "Strided: stride: expected 1 or more, got 0"),
        (lambda: Fixed(0), "Fixed: stride: expected 1 or more"),
        (lambda: Fixed(4, 0), "Fixed: columns: expected 1 or more, got 0"),
        (lambda: Fixed(4, 5), "Fixed: columns: expected at most the 4 positions of a block, got 5"),
        (lambda: Summary(4, 5), "Summary: columns: expected at most"),
        (lambda: Window(0), "Window: a window of 0 keys"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_neighbouring_heads_may_share_a_pattern():
    """Of three heads two are computed together, for two short rows at once."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 13, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    pattern = PerHead((Window(2), Window(2), Strided(3)))
    results = []
    for backend in ("tiled", "definition"):
        out = attend(*inputs, pattern=pattern, backend=backend)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
