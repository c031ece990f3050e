"""Blocks chosen by content: the gathered form with grouped heads and padding, and limits of the choice."""

import re

import naive_mechanisms as naive
import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import MobaConfig, NSAConfig, SoftmaxConfig, TopBlocksConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context, positions_from_mask

BATCH, HEADS, GROUPS, WIDTH, LENGTH = 2, 4, 2, 6, 23
MEMBERS = [
    TopBlocksConfig(block_size=3, keep=4, local=2),
    MobaConfig(block_size=4, top_k=3),
    NSAConfig(block_size=3, top_k=2, window=4),
]


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, LENGTH, WIDTH, dtype=dtype)
    k, v = (torch.randn(BATCH, HEADS // GROUPS, LENGTH, WIDTH, dtype=dtype) for _ in range(2))
    return q, k, v


def padded(causal: bool = True) -> Context:
    """The first row begins with padding."""
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[0, :5] = False
    places = positions_from_mask(valid)
    return Context(LENGTH, LENGTH, causal=causal, q_pos=places, kv_pos=places, kv_valid=valid)


def mixed(config: MechanismConfig, inputs: tuple[Tensor, Tensor, Tensor], context: Context) -> Tensor:
    return config.build(HEADS, WIDTH).eval()(*inputs, context, None, None)[0]


@pytest.mark.parametrize("config", MEMBERS, ids=lambda config: config.kind)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_gathered_blocks_are_the_mask(config: MechanismConfig, causal: bool):
    # Scores of thousands overflow compared with the near blocks.
    for dtype, apart, factor in (
        (torch.float64, 1e-10, 1),
        (torch.float32, 1e-5, 1),
        (torch.float64, 1e-8, 2e3),
    ):
        q, k, v = heads(dtype)
        fast, plain = (
            mixed(form, (q * factor, k, v), padded(causal)) for form in (config, config.definition())
        )
        torch.testing.assert_close(fast[0, :, 5:], plain[0, :, 5:], rtol=0, atol=apart)
        torch.testing.assert_close(fast[1], plain[1], rtol=0, atol=apart)


@pytest.mark.parametrize("config", MEMBERS, ids=lambda config: config.kind)
def test_padding_and_later_tokens_do_not_change_the_choice(config: MechanismConfig):
    q, k, v = inputs = heads()
    y = mixed(config, inputs, padded())
    whole = q[:1, :, 5:], k[:1, :, 5:], v[:1, :, 5:]
    assert torch.allclose(y[:1, :, 5:], mixed(config, whole, Context(18, 18, causal=True)), atol=1e-12)
    for x in inputs:
        x[:, :, 14:] = torch.randn_like(x[:, :, 14:]) * 9
    # Later queries change the sizes of products, and so only the last bits.
    assert torch.allclose(mixed(config, inputs, padded())[:, :, :14], y[:, :, :14], rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", MEMBERS[1:], ids=lambda config: config.kind)
def test_grouped_heads_equal_the_public_references(config: MechanismConfig):
    """Random tensors in float32: `moba_attn_varlen_naive` of MoonshotAI/MoBA, `naive_nsa` of fla-org.

    Both repeat the keys of a group. In MoBA every head ranks blocks itself; in NSA the group ranks them by
    the sum of its probabilities, and blocks are means.
    """
    y = mixed(config, heads(torch.float32), Context(LENGTH, LENGTH, causal=True)).detach()
    q, k, v = (x.double().numpy() for x in heads(torch.float32))
    causal, documents = np.tril(np.ones((LENGTH, LENGTH), dtype=bool)), [list(range(LENGTH))]
    for row, head in np.ndindex(BATCH, HEADS):
        kv = head // GROUPS
        pair = k[row, kv], v[row, kv], causal
        if isinstance(config, NSAConfig):
            group, ones = list(q[row, kv * GROUPS : (kv + 1) * GROUPS]), np.ones((3, WIDTH))
            halves = [np.full(LENGTH, 0.5)] * 3
            rest = config, (ones, ones), halves, documents, True
            expected = naive.nsa(q[row, head], group, *pair, *rest)
        else:
            assert isinstance(config, MobaConfig)
            expected = naive.chosen_blocks(q[row, head], *pair, config.ranking(), documents, True)
        np.testing.assert_allclose(y[row, head], expected, rtol=0, atol=1e-5)


def test_a_text_of_few_blocks_is_dense():
    config = TopBlocksConfig(block_size=3, keep=8, local=2)
    dense = mixed(SoftmaxConfig(), heads(), Context(LENGTH, LENGTH, causal=True))
    assert torch.allclose(mixed(config, heads(), Context(LENGTH, LENGTH, causal=True)), dense, atol=1e-12)


def test_fewer_blocks_than_are_always_kept_are_refused():
    with pytest.raises(
        InputError, match=re.escape("keep: expected at least first + local = 5 blocks, got 4")
    ):
        TopBlocksConfig(keep=4, first=1, local=4)
