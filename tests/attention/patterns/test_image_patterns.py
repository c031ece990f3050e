"""Local attention in images: masks by hand, the rule in plain loops, and layouts that waste nothing."""

import math

import pytest
import torch
from torch import Tensor

from pairwise import pairwise
from polyformer import InputError
from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Local1D, Local2D, Neighbourhood, Pattern
from polyformer.attention.patterns.layout import count
from polyformer.core.sequence.context import Context, Image


def mask(pattern: Pattern, context: Context, row: int = 0) -> Tensor:
    """[Tq, Tk], what the pattern alone allows in one batch row."""
    b, h = torch.tensor(row), torch.tensor(0)
    return pattern.mask(context, b, h, torch.arange(context.q_len)[:, None], torch.arange(context.kv_len))


def drawn(picture: str) -> Tensor:
    """A picture of 1s and dots as a mask."""
    return torch.tensor([[cell == "1" for cell in line.strip()] for line in picture.strip().splitlines()])


def test_local_1d_by_hand():
    expected = drawn("""
        1......
        11.....
        111....
        .111...
        .1111..
        .11111.
        ....111
    """)
    pattern, context = Local1D(3, 2), Context(7, 7, causal=True)
    allowed = mask(pattern, context) & torch.ones(7, 7).tril().bool()
    assert torch.equal(allowed, expected)


def test_local_2d_by_hand():
    """What pixel (2, 2) of a 4 x 5 image sees with query blocks of 2 x 2 and 1 above, 1 left, 2 right."""
    pattern = Local2D((4, 5), query=(2, 2), memory=(1, 1, 2))
    seen = mask(pattern, Context(20, 20))
    inner = drawn("""
        .....
        .1111
        .1111
        .1111
    """)
    corner = drawn("""
        1111.
        1111.
        .....
        .....
    """)
    edge = drawn("""
        .....
        ...11
        ...11
        ...11
    """)
    assert torch.equal(seen[2 * 5 + 2].view(4, 5), inner)
    assert torch.equal(seen[0].view(4, 5), corner)
    assert torch.equal(seen[3 * 5 + 4].view(4, 5), edge)
    raster = mask(pattern, Context(20, 20, causal=True)) & torch.ones(20, 20).tril().bool()
    assert torch.equal(raster[2 * 5 + 2].view(4, 5), inner & (torch.arange(20) <= 12).view(4, 5))


def sees(pattern: Local2D, query: int, key: int) -> bool:
    """The rule of 2D blocks, place by place."""
    _, width, channels = (*pattern.shape, 1)[:3]
    (row, column), (key_row, key_column) = (divmod(index // channels, width) for index in (query, key))
    (height, across), (above, left, right) = pattern.query, pattern.memory
    top, side = row - row % height, column - column % across
    return top - above <= key_row < top + height and side - left <= key_column < side + across + right


@pytest.mark.parametrize(
    "pattern",
    [
        Local2D((5, 7), (2, 3), (1, 2, 1)),
        Local2D((4, 3, 3), (3, 2), (2, 1, 0)),
        Local2D((6, 6), (1, 1), (0, 0, 0)),
        Local2D((3, 4), (9, 9), (9, 9, 9)),
    ],
)
def test_local_2d_is_its_rule(pattern: Local2D):
    size = math.prod(pattern.shape) + 1  # a start token makes one more
    expected = torch.tensor([[sees(pattern, i, j) for j in range(size)] for i in range(size)])
    assert torch.equal(mask(pattern, Context(size, size)), expected)


@pytest.mark.parametrize(
    ("pattern", "causal", "block"),
    pairwise(
        [
            Local1D(4, 3),
            Local1D(3, 0),
            Local1D(10, 64),
            Local2D((9, 7), (2, 3), (1, 2, 1)),
            Local2D((8, 3, 3), (3, 2), (2, 1, 0)),
            Local2D((5, 13), (5, 1), (0, 3, 9)),
        ],
        [False, True],
        [1, 7, 64],
    ),
)
def test_needed_keys_are_exact(pattern: Pattern, causal: bool, block: int):
    context = Context(50, 61, causal=causal)
    allowed = mask(pattern, context)
    for row in pattern.layout(context, block):
        mine, some, full = allowed[row.start : row.stop], torch.zeros(61).bool(), torch.zeros(61).bool()
        for flags, intervals in ((some, row.keys.some), (full, row.keys.full)):
            for start, stop in intervals:
                flags[start:stop] = True
        assert torch.equal(some, mine.any(0))
        assert torch.equal(full, mine.all(0))


@pytest.mark.parametrize(
    ("first", "block", "pattern"),
    pairwise(
        [1, 2],
        [1, 7, 64],
        [Local2D((5, 7), (2, 3), (1, 2, 1)), Local2D((5, 7), (1, 1), (0, 0, 0)), Local1D(4, 3)],
    ),
)
def test_tokens_before_an_image_see_all_and_are_seen_by_all(pattern: Pattern, first: int, block: int):
    """The patches see one another as in an image alone."""
    size = first + 35
    context = Context(size, size, image=Image(first, 5, 7))
    alone = mask(pattern, Context(35, 35))
    expected = torch.ones(size, size).bool()
    for i in range(35):
        for j in range(35):
            seen = sees(pattern, i, j) if isinstance(pattern, Local2D) else alone[i, j]
            expected[first + i, first + j] = bool(seen)
    assert torch.equal(mask(pattern, context), expected)
    for row in pattern.layout(context, block):
        mine, some, full = expected[row.start : row.stop], torch.zeros(size).bool(), torch.zeros(size).bool()
        for flags, intervals in ((some, row.keys.some), (full, row.keys.full)):
            for start, stop in intervals:
                flags[start:stop] = True
        assert torch.equal(some, mine.any(0))
        assert torch.equal(full, mine.all(0))


@pytest.mark.parametrize("backend", ["auto", "tiled", "definition"])
def test_calls_of_one_length_keep_their_images_apart(backend: str):
    """The same pattern and lengths with 0, 1 and 2 tokens before: plans that are kept must not be mixed."""
    pattern = Local1D(4, 3)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 36, 4, dtype=torch.float64) for _ in range(3))
    for image in (None, Image(1, 5, 7), Image(2, 2, 17), Image(1, 5, 7)):
        context = Context(36, 36, image=image)
        scores = (q @ k.mT / 2).masked_fill(~mask(pattern, context), -torch.inf)
        expected = scores.softmax(-1) @ v
        actual = attend(q, k, v, pattern=pattern, context=context, backend=backend)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_images_packed_in_a_row_are_seen_as_alone():
    """The second of two images of 12 pixels begins in the middle of a row of tokens, and not on a block."""
    pattern = Local2D((4, 3), (2, 2), (1, 1, 0))
    doc = torch.tensor([[0] * 5 + [1] * 12, [0] * 12 + [1] * 5])
    pos = torch.cat([torch.cat([torch.arange(a), torch.arange(17 - a)])[None] for a in (5, 12)])
    context = Context(17, 17, causal=True, q_pos=pos, kv_pos=pos, q_doc=doc, kv_doc=doc)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 17, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, pattern=pattern, context=context, backend="tiled")
    for row, start, stop in ((0, 0, 5), (0, 5, 17), (1, 0, 12), (1, 12, 17)):
        parts = [x[row : row + 1, :, start:stop] for x in (q, k, v)]
        alone = Context(stop - start, stop - start, causal=True)
        expected = attend(*parts, pattern=pattern, context=alone, backend="definition")
        torch.testing.assert_close(out[row : row + 1, :, start:stop], expected, rtol=1e-10, atol=1e-12)
    narrow = pattern.keys(context, 15, 16)
    assert count(narrow.some) < 17, "images that begin at slots of their own have exact keys too"


@pytest.mark.parametrize("pattern", [Local1D(64, 128), Local2D((256, 256), (8, 8), (8, 4, 4))])
def test_keys_do_not_grow_with_the_image(pattern: Pattern):
    widest = {
        n: max(count(row.keys.some) for row in pattern.layout(Context(n, n, causal=True), 64))
        for n in (4096, 65536)
    }
    assert widest[4096] == widest[65536]


def test_another_grid_of_patches_is_refused():
    x, pattern = torch.randn(1, 1, 13, 4), Local2D((4, 3), (2, 2), (1, 1, 1))
    attend(x, x, x, pattern=pattern, context=Context(13, 13, image=Image(1, 4, 3)))
    with pytest.raises(
        InputError, match=r"shape: expected 3x4, the rows and columns of patches, got 4x3; use shape=\[3, 4\]"
    ):
        attend(x, x, x, pattern=pattern, context=Context(13, 13, image=Image(1, 3, 4)))


def test_an_image_of_another_size_is_refused():
    pattern = Local2D((4, 3), (2, 2), (1, 1, 1))
    x = torch.randn(1, 1, 14, 4)
    message = "Local2D: 14 tokens do not fit the shape 4x3, which has 12 places and one for a start token"
    for backend in ("auto", "tiled", "definition"):
        attend(x[:, :, :13], x[:, :, :13], x[:, :, :13], pattern=pattern, backend=backend)
        with pytest.raises(InputError, match=message):
            attend(x, x, x, pattern=pattern, backend=backend)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Local1D(0, 3), "Local1D: query_block: expected 1 or more, got 0"),
        (lambda: Local1D(3, -1), "Local1D: memory: expected 0 or more, got -1"),
        (
            lambda: Local2D((4,), (2, 2), (1, 1, 1)),
            "Local2D: shape: expected 2 or 3 whole numbers of 1 or more",
        ),
        (lambda: Local2D((4, 0), (2, 2), (1, 1, 1)), r"Local2D: shape: .* got \(4, 0\)"),
        (lambda: Local2D((4, 4), (2,), (1, 1, 1)), "Local2D: query: expected 2 whole numbers of 1 or more"),
        (lambda: Local2D((4, 4), (2, 2), (1, 1)), "Local2D: memory: expected 3 whole numbers of 0 or more"),
        (lambda: Local2D((4, 4), (2, 2), (1, 1, -1)), "Local2D: memory"),
        (lambda: Local2D(16, (2, 2), (1, 1, 1)), "Local2D: shape: .* got 16"),
        (lambda: Neighbourhood((4, 3), 2), "Neighbourhood: kernel: expected an odd number of at most 3"),
        (lambda: Neighbourhood((4, 3), 5), "Neighbourhood: kernel: .* got 5"),
    ],
)
def test_sizes_are_checked(make, message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_text_form_reads_back():
    pattern = Local2D((4, 3), (2, 2), (1, 1, 1))
    assert pattern.to_text() == "Local2D(shape=[4, 3], query=[2, 2], memory=[1, 1, 1])"
    assert (
        Pattern.from_text(pattern.to_text()) == pattern == Pattern.from_text("Local2D([4,3],[2,2],[1,1,1])")
    )
