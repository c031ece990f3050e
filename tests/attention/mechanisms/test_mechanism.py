"""The seam of mechanisms: what the base declares, and what cross-attention keeps of a mechanism."""

import dataclasses

import pytest
import torch

from polyformer.attention.mechanisms import (
    AdaptiveSpanConfig,
    DifferentialConfig,
    DynamicSpanConfig,
    ForgettingConfig,
    LinformerConfig,
    LSHConfig,
    MemoryCompressedConfig,
    PerformerConfig,
    RFAConfig,
    RoutingConfig,
    SoftmaxConfig,
    SVDConfig,
)
from polyformer.attention.mechanisms.base import CAPABILITIES, Mechanism, MechanismConfig
from polyformer.attention.patterns import Global, Window
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context


def test_by_default_a_mechanism_can_do_nearly_everything():
    for ability in CAPABILITIES:
        if ability not in (*("supports_part_rotations", "supports_recurrence", "supports_context_parallel"),):
            MechanismConfig().require(ability)
    assert Mechanism().new_state(3) is None


def test_what_is_not_there_is_refused_with_the_way_out():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Blind(MechanismConfig):
        causal = False

    with pytest.raises(InputError) as caught:
        Blind().require("causal")
    message = "mechanism '' cannot run in a decoder: it sees later tokens; use 'softmax', which takes"
    assert str(caught.value) == f"{message} sparse patterns"
    Blind().require("supports_packing")


def test_patterns_are_of_a_sequence_and_itself():
    """Another sequence has its own length and order: a window over it means nothing."""
    config = SoftmaxConfig(pattern=Window(3) | Global(1), dropout=0.2, scale=0.5)
    assert config.cross() == SoftmaxConfig(dropout=0.2, scale=0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(MechanismConfig):
    """A user's mechanism, which says nothing of cross-attention."""

    window: int = 3
    dropout: float = 0.1
    backend: str = "blocks"


def test_cross_attention_is_softmax_over_all_keys_by_default():
    """With the member's own dropout and backend, where it has them."""
    assert MechanismConfig().cross() == SoftmaxConfig()
    assert Own().cross() == SoftmaxConfig(dropout=0.1, backend="blocks")
    assert LSHConfig().cross() == RoutingConfig().cross() == SoftmaxConfig()
    for member in (AdaptiveSpanConfig, DynamicSpanConfig, MemoryCompressedConfig):
        assert member(dropout=0.3, backend="sdpa").cross() == SoftmaxConfig(dropout=0.3, backend="sdpa")


@pytest.mark.parametrize(
    "config", [PerformerConfig(), RFAConfig(), LinformerConfig(), SVDConfig()], ids=lambda config: config.kind
)
def test_members_that_ask_nothing_of_slots_read_another_sequence_themselves(config: MechanismConfig):
    assert config.cross() is config


def test_the_definition_keeps_everything_but_the_way():
    config = SoftmaxConfig(pattern=Window(3), scale=0.5)
    assert config.definition() == SoftmaxConfig(pattern=Window(3), scale=0.5, backend="definition")
    assert SVDConfig(rank=2).definition() == SVDConfig(rank=2)


def test_no_gate_of_padding_lets_tokens_fade():
    """Padding between tokens, as after chunks of rows with different lengths."""
    torch.manual_seed(0)
    module = ForgettingConfig(gate_bias=0.0).build(2, 4)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    real = torch.tensor([0, 1, 3, 4])
    valid = torch.tensor([[True, True, False, True, True]])
    y, _ = module(q, k, v, Context(5, 5, causal=True, kv_valid=valid), None, None)
    without = (x[:, :, real] for x in (q, k, v))
    expected, _ = module(*without, Context(4, 4, causal=True), None, None)
    torch.testing.assert_close(y[:, :, real], expected)


def test_the_second_map_has_the_papers_factor_in_each_layer():
    factors = [DifferentialConfig().for_layer(layer).initial for layer in (0, 1, 11)]
    assert factors == pytest.approx([0.2, 0.35551, 0.77787], abs=1e-5)
