"""ETC: its four pieces as the paper writes them, its layout, and one softmax over [global; long]."""

import math

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.patterns import ETC, Global, Pattern, Window
from polyformer.attention.patterns.layout import count
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

GLOBAL, LONG = 3, 10
SEGMENTS = [0, 1, 2, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
HARD = [(False, False), (True, False), (False, True), (True, True)]


def pieces(radius: int, hard_g2l: bool, hard_l2g: bool, segments: list[int]) -> Tensor:
    """The four masks, each written out by its definition, and put together."""
    glob, long = segments[:GLOBAL], segments[GLOBAL:]
    g2g = [[True for _ in glob] for _ in glob]
    g2l = [[not hard_g2l or mine == other for other in long] for mine in glob]
    l2g = [[not hard_l2g or mine == other for other in glob] for mine in long]
    l2l = [[abs(i - j) <= radius for j in range(len(long))] for i in range(len(long))]
    return torch.cat(
        [
            torch.cat([torch.tensor(g2g), torch.tensor(g2l)], 1),
            torch.cat([torch.tensor(l2g), torch.tensor(l2l)], 1),
        ]
    )


def dense(pattern: Pattern, context: Context, rows: int = 1) -> Tensor:
    b, h = torch.arange(rows).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long)
    q_idx, kv_idx = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    return pattern.allows(context, b, h, q_idx, kv_idx).expand(rows, 1, context.q_len, context.kv_len)[:, 0]


def structured(segments: Tensor) -> Context:
    length = segments.shape[1]
    return Context(length, length, q_segment=segments, kv_segment=segments)


@pytest.mark.parametrize("radius", [1, 2, 4, 30])
@pytest.mark.parametrize(("hard_g2l", "hard_l2g"), HARD)
def test_the_four_pieces_are_those_of_the_paper(radius: int, hard_g2l: bool, hard_l2g: bool):
    pattern = ETC(GLOBAL, radius, hard_g2l, hard_l2g)
    assert torch.equal(
        dense(pattern, structured(torch.tensor([SEGMENTS])))[0], pieces(radius, hard_g2l, hard_l2g, SEGMENTS)
    )


def test_without_segments_the_document_is_one_and_hard_pieces_limit_nothing():
    plain = Context(13, 13)
    assert torch.equal(dense(ETC(GLOBAL, 2, True, True), plain)[0], pieces(2, False, False, SEGMENTS))


def test_soft_pieces_are_a_window_and_global_tokens():
    context = Context(13, 13)
    assert torch.equal(dense(ETC(3, 2), context), dense(Window(2) | Global(3), context))


def test_padding_on_the_left_and_packing_move_the_global_tokens_along():
    """Two documents in one row after padding: the global tokens of each are its own first ones."""
    lengths, before = [7, 6], 2
    document = torch.tensor([[0] * (before + lengths[0]) + [1] * lengths[1]])
    position = torch.tensor([[0] * before + list(range(lengths[0])) + list(range(lengths[1]))])
    segment = torch.tensor([[9] * before + [0, 1, 2, 0, 1, 1, 2] + [1, 1, 2, 2, 1, 2]])
    total = position.shape[1]
    context = Context(
        total,
        total,
        q_pos=position,
        kv_pos=position,
        q_doc=document,
        kv_doc=document,
        q_segment=segment,
        kv_segment=segment,
    )
    whole = dense(ETC(GLOBAL, 1, True, True), context)[0]
    start = before
    for length in lengths:
        own = segment[0, start : start + length]
        alone = dense(ETC(GLOBAL, 1, True, True), structured(own.unsqueeze(0)))[0]
        assert torch.equal(whole[start : start + length, start : start + length], alone)
        start += length


def random_segments(rows: int, glob: int, long: int) -> Tensor:
    """A number for each global token, and sentences of many lengths, in another order in the second row."""
    torch.manual_seed(2)
    segments = []
    for row in range(rows):
        sentences = torch.randint(glob, (long,)).sort(descending=row == 1).values
        segments.append(torch.cat([torch.arange(glob), sentences]))
    return torch.stack(segments)


@pytest.mark.parametrize(("hard_g2l", "hard_l2g"), HARD)
def test_the_layout_covers_the_mask(hard_g2l: bool, hard_l2g: bool):
    segments = random_segments(2, 35, 200)
    pattern, context = ETC(35, 5, hard_g2l, hard_l2g), structured(segments)
    allowed = dense(pattern, context, rows=2)
    for block in (1, 7, 64, 300):
        for row in pattern.layout(context, block):
            mine = allowed[:, row.start : row.stop]
            outside = torch.ones(235, dtype=torch.bool)
            for start, stop in row.keys.some:
                outside[start:stop] = False
            assert not mine[..., outside].any()
            for start, stop in row.keys.full:
                assert mine[..., start:stop].all()


def test_rows_of_one_query_are_exact():
    """What a single query may see is what its row of the layout names, no key more."""
    context = structured(random_segments(1, 35, 200))
    for hard in HARD:
        pattern = ETC(35, 5, *hard)
        seen = [count(row.keys.some) for row in pattern.layout(context, 1)]
        assert seen == dense(pattern, context)[0].sum(-1).tolist()


def test_structure_makes_the_layout_smaller():
    """16 tokens a sentence: the hard global rows hold a sixteenth of the text, not all of it."""
    segments = torch.cat([torch.arange(256), torch.arange(256).repeat_interleave(16)]).unsqueeze(0)
    context = structured(segments)

    def scores(pattern: ETC) -> int:
        rows = pattern.layout(context, 128)
        return sum((row.stop - row.start) * count(row.keys.some) for row in rows if row.start < 256)

    assert scores(ETC(256, 84)) == 256 * (256 + 4096)
    assert scores(ETC(256, 84, hard_g2l=True)) == 256 * (256 + 16 * 16)


def piecewise(
    q: Tensor, k: Tensor, v: Tensor, glob: int, radius: int, hard: tuple[bool, bool], segments: Tensor
) -> Tensor:
    """Global and long attention computed apart, from separate global and long tensors."""
    masks = [pieces(radius, hard[0], hard[1], row.tolist()) for row in segments]
    allowed = torch.stack(masks).unsqueeze(1)
    outputs = []
    for queries in (slice(0, glob), slice(glob, None)):
        scores = []
        for keys in (slice(0, glob), slice(glob, None)):
            logits = q[:, :, queries] @ k[:, :, keys].mT / math.sqrt(q.shape[-1])
            scores.append(logits.masked_fill(~allowed[:, :, queries, keys], -math.inf))
        weights = torch.cat(scores, -1).softmax(-1)
        to_global, to_long = weights.split([glob, q.shape[2] - glob], -1)
        outputs.append(to_global @ v[:, :, :glob] + to_long @ v[:, :, glob:])
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("backend", ["tiled", "definition"])
def test_one_row_equals_two_attentions_computed_apart(backend: str, hard: tuple[bool, bool]):
    torch.manual_seed(0)
    segments = torch.tensor([SEGMENTS * 7, SEGMENTS * 7])
    segments[:, GLOBAL:] = torch.randint(3, (2, 88)).sort(1).values
    inputs = [torch.randn(2, 3, 91, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, 3, 91, 5, dtype=torch.float64)
    results = []
    for output in (
        attend(*inputs, pattern=ETC(GLOBAL, 4, *hard), context=structured(segments), backend=backend),
        piecewise(inputs[0], inputs[1], inputs[2], GLOBAL, 4, hard, segments),
    ):
        results.append((output, *torch.autograd.grad((output * weight).sum(), inputs)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_long_text_is_computed_by_its_layout():
    context = structured(random_segments(1, 64, 4032))
    q = torch.zeros(1, 1, 4096, 4)
    assert explain(q, q, q, pattern=ETC(64, 8, True), context=context).backend == "tiled"


@pytest.mark.parametrize(
    ("tokens", "radius", "message"),
    [
        (0, 2, "ETC: global_tokens: expected 1 or more, got 0; without global tokens use Window"),
        (2, 0, "ETC: radius: expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_is_named(tokens: int, radius: int, message: str):
    with pytest.raises(InputError) as caught:
        ETC(tokens, radius)
    assert str(caught.value) == message


def test_segments_of_another_length_are_named():
    wrong = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(InputError, match="q_segment: expected 5 entries per row"):
        Context(5, 5, q_segment=wrong, kv_segment=wrong)
    with pytest.raises(InputError, match="q_segment and kv_segment: expected both or neither"):
        Context(4, 5, q_segment=wrong)
