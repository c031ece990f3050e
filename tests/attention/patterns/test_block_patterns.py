"""Blockwise attention against the paper's masks, windows of blocks, tables of links, global ends."""

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import BlockWindow, Blockwise, Global, GlobalEnd, Links, Pattern, PerHead
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.config import ModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig


def mask(pattern: Pattern, context: Context, head: int = 0, row: int = 0) -> Tensor:
    """[Tq, Tk] of one head of one batch row."""
    b, h = torch.full((1, 1, 1, 1), row), torch.full((1, 1, 1, 1), head)
    q_idx, kv_idx = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    return pattern.mask(context, b, h, q_idx, kv_idx).expand(1, 1, -1, -1)[0, 0]


def of_blocks(table: list[list[int]], size: int, length: int) -> Tensor:
    """The mask in which block i of queries sees the blocks table[i]."""
    blocks = torch.zeros(len(table), len(table), dtype=torch.bool)
    for i, row in enumerate(table):
        blocks[i, row] = True
    return blocks.repeat_interleave(size, 0).repeat_interleave(size, 1)[:length, :length]


def test_blockwise_is_the_papers_mask():
    """Equation 3 with three blocks, for the identity and both shifts; two heads of the first."""
    patterns = PerHead(Blockwise.heads(2, 3, (2, 1, 1)))
    context = Context(6, 6)
    for head, table in enumerate([[[0], [1], [2]], [[0], [1], [2]], [[1], [2], [0]], [[2], [0], [1]]]):
        assert torch.equal(mask(patterns, context, head), of_blocks(table, 2, 6))


def test_any_permutation():
    assert torch.equal(mask(Blockwise(2, (2, 1, 0)), Context(6, 6)), of_blocks([[2], [1], [0]], 2, 6))


def test_a_longer_text_begins_the_permutation_again():
    expected = of_blocks([[1], [0], [3], [2], []], 3, 13)  # the last block's partner is not there
    assert torch.equal(mask(Blockwise(3, (1, 0)), Context(13, 13)), expected)


def test_blocks_follow_positions_of_each_row():
    """Left padding of 1 in the first row and 3 in the second: a block is the same tokens."""
    positions = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3, 4]])
    context = Context(8, 8, q_pos=positions, kv_pos=positions)
    pattern = Blockwise(2, (1, 0))
    for row, padding in enumerate((1, 3)):
        own = mask(pattern, context, row=row)[padding:, padding:]
        assert torch.equal(own, mask(pattern, Context(8 - padding, 8 - padding)))
    keys = pattern.keys(context, 5, 7)
    assert keys.some == ((0, 5), (7, 8))  # what either row needs
    assert keys.full == ()
    alone = pattern.keys(context.rows(0, 1), 5, 7)  # positions 4 and 5, block 2, whose partner is block 3
    assert alone.some == alone.full == ((7, 8),)


def test_a_window_of_blocks():
    expected = of_blocks([[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]], 2, 7)
    assert torch.equal(mask(BlockWindow(2, 1, 1), Context(7, 7)), expected)
    assert torch.equal(
        mask(BlockWindow(2, 2, 0), Context(7, 7)), of_blocks([[0], [0, 1], [0, 1, 2], [1, 2, 3]], 2, 7)
    )
    keys = BlockWindow(64, 1, 1).keys(Context(640, 640), 128, 192)
    assert keys.some == keys.full == ((64, 256),)


def test_links_are_a_table_of_blocks():
    table = [[0, 2], [], [1], [3, 0]]
    assert torch.equal(mask(Links(2, tuple(map(tuple, table))), Context(8, 8)), of_blocks(table, 2, 8))
    longer = mask(Links(2, ((0,), (1, 7))), Context(8, 8))
    assert torch.equal(longer, of_blocks([[0], [1], [], []], 2, 8))
    again = Pattern.from_text(Links(2, ((0,), (1, 7))).to_text())
    assert again == Links(2, ((0,), (1, 7)))


def test_the_end_of_every_document_is_global():
    document = torch.tensor([[0, 0, 0, 5, 5, 5, 5]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 2]])
    valid = torch.tensor([[True] * 6 + [False]])
    context = Context(
        7, 7, q_pos=positions, kv_pos=positions, q_doc=document, kv_doc=document, kv_valid=valid
    )
    seen = mask(GlobalEnd(1), context)
    assert seen[0].tolist() == [False, False, True, False, False, True, True]  # padding repeats a position
    assert seen[:, 0].tolist() == [False, False, True, False, False, True, True]
    assert mask(GlobalEnd(2), Context(4, 4))[0].tolist() == [False, False, True, True]
    assert mask(GlobalEnd(2), Context(4, 4))[3].all()


def test_a_rows_own_end_counts():
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])
    context = Context(4, 4, kv_valid=valid)
    assert mask(GlobalEnd(1), context, row=0)[0].tolist() == [False, False, False, True]
    assert mask(GlobalEnd(1), context, row=1)[0].tolist() == [False, True, True, True]


def test_a_decoder_has_no_end():
    message = "GlobalEnd: a causal query cannot know where its document ends"
    for use in (
        lambda context: mask(GlobalEnd(1), context),
        lambda context: GlobalEnd(1).keys(context, 0, 2),
    ):
        with pytest.raises(InputError, match=message):
            use(Context(4, 4, causal=True))
    config = SoftmaxConfig(pattern=Global(1) | PerHead((GlobalEnd(1),)))
    stack = StackConfig(attention=AttentionConfig(mechanism=config))
    with pytest.raises(InputError, match=r"cannot run in a decoder.*does not depend on later tokens"):
        ModelConfig(vocab_size=5, decoder=stack)
    assert SoftmaxConfig(pattern=Global(1)).causal


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blockwise(0), "Blockwise: size: expected 1 or more, got 0"),
        (lambda: Blockwise(2, shift=2), "Blockwise: shift: expected less than the size 2, got 2"),
        (lambda: Blockwise(2, ()), "Blockwise: permutation: expected each of"),
        (lambda: Blockwise(2, (0, 2)), r"expected each of 0\.\.1 once, got \(0, 2\)"),
        (lambda: Blockwise(2, (0, 0)), r"expected each of 0\.\.1 once, got \(0, 0\)"),
        (lambda: Blockwise.heads(2, 2, (1, 1, 1)), "counts: expected at most 2 numbers of heads"),
        (lambda: BlockWindow(2, -1), "BlockWindow: before: expected 0 or more"),
        (lambda: Links(2, ()), "Links: table: expected a list of block numbers"),
        (lambda: Links(2, ((-1,),)), "Links: table: expected a list of block numbers"),
        (lambda: GlobalEnd(0), "GlobalEnd: tokens: expected 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str):
    with pytest.raises(InputError, match=message):
        make()
