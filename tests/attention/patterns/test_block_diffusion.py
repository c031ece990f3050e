"""The mask of block diffusion against the paper's figure, its layouts, and what one pass computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import dense
from polyformer import attend
from polyformer.attention.patterns import BlockDiffusion
from polyformer.attention.patterns.block_diffusion import copies_context
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

FIGURE = """
    110000 000000
    110000 000000
    001100 110000
    001100 110000
    000011 111100
    000011 111100
    000000 110000
    000000 110000
    000000 111100
    000000 111100
    000000 111111
    000000 111111
"""
"""Arriola et al. 2025, the figure of the mask: three blocks of two tokens, the noised copy first."""


def drawn(text: str) -> Tensor:
    rows = text.split()
    joined = [left + right for left, right in zip(rows[::2], rows[1::2])]
    return torch.tensor([[mark == "1" for mark in row] for row in joined])


def test_the_mask_is_the_papers_figure():
    assert torch.equal(dense(BlockDiffusion(2), copies_context(6), 1, 1)[0, 0], drawn(FIGURE))


def test_without_copies_blocks_see_themselves_and_earlier_blocks():
    """As the clean copy alone, also for the queries after a cache."""
    clean = drawn(FIGURE)[6:, 6:]
    assert torch.equal(dense(BlockDiffusion(2), Context(6, 6), 1, 1)[0, 0], clean)
    assert torch.equal(dense(BlockDiffusion(2), Context(2, 6), 1, 1)[0, 0], clean[4:])


def test_a_layout_has_the_needed_keys_only():
    """A row of noised queries needs its block and the clean blocks before it, none of the others."""
    pattern, context = BlockDiffusion(64), copies_context(512)
    rows = pattern.layout(context, 64)
    assert rows[3].keys.some == rows[3].keys.full == ((192, 256), (512, 704))
    assert rows[8 + 3].keys.some == rows[8 + 3].keys.full == ((512, 768),)
    mixed = pattern.keys(context, 448, 576)  # the last noised and the first clean block
    assert mixed.some == ((448, 960),)
    assert mixed.full == ((512, 576),)


@pytest.mark.parametrize("length", [12, 29])
def test_a_layout_covers_the_mask_of_copies(length: int):
    """Also if a row has two documents, and if copies are mixed with other texts."""
    torch.manual_seed(0)
    positions = torch.randint(0, length, (2, 2 * length))
    segments = torch.randint(0, 2, (2, 2 * length))
    tables: dict[str, Any] = {
        "q_pos": positions,
        "kv_pos": positions,
        "q_segment": segments,
        "kv_segment": segments,
    }
    for context in (copies_context(length, 2), Context(2 * length, 2 * length, **tables)):
        for size in (1, 3, 5):
            mask = dense(BlockDiffusion(size), context, 2, 1)[:, 0]
            for block in (1, 4, 7, 64):
                for row in BlockDiffusion(size).layout(context, block):
                    needed = torch.zeros(2 * length, dtype=torch.bool)
                    for start, stop in row.keys.some:
                        needed[start:stop] = True
                    own = mask[:, row.start : row.stop]
                    assert not (own.any(0).any(0) & ~needed).any()
                    assert all(bool(own[..., start:stop].all()) for start, stop in row.keys.full)


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_backends_agree_on_copies(backend: str):
    torch.manual_seed(0)
    length, context = 37, copies_context(37, 2)
    inputs = [torch.randn(2, 2, 2 * length, 8, dtype=torch.double, requires_grad=True) for _ in range(3)]
    results = [
        attend(*inputs, pattern="BlockDiffusion(5)", context=context, backend=name)
        for name in (backend, "definition")
    ]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), inputs) for x in results))


def test_one_pass_denoises_every_block_as_if_it_alone_were_noised():
    """A block of the noised copy has the output of the clean blocks before it followed by this block."""
    torch.manual_seed(0)
    length, size = 11, 4
    noised, clean = (torch.randn(3, 1, 2, length, 8, dtype=torch.double) for _ in range(2))
    copies = attend(
        *torch.cat([noised, clean], 3), pattern=BlockDiffusion(size), context=copies_context(length)
    )
    for start in range(0, length, size):
        text = torch.cat([clean[..., :start, :], noised[..., start : start + size, :]], 3)
        alone = attend(*text, pattern=BlockDiffusion(size))
        torch.testing.assert_close(copies[:, :, start : min(start + size, length)], alone[:, :, start:])


def test_a_size_of_nothing_is_refused():
    with pytest.raises(InputError, match="BlockDiffusion: size: expected 1 or more, got 0"):
        BlockDiffusion(0)
