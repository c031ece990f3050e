"""Two kinds of attention side by side: the sum of both, each as it is alone."""

import dataclasses
from typing import Any

import pytest
import torch

from polyformer import Transformer, create_model
from polyformer.attention.mechanisms import MechanismConfig, SoftmaxConfig, SSDConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import AlibiConfig, NoPositionConfig
from polyformer.attention.positions.added import NoPosition
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.context_parallel import ContextParallel, use_context_parallel
from polyformer.nn.depth import DepthConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.stack import AttentionConfig, BesideConfig, StackConfig, build_stack
from polyformer.nn.stack.beside import AttentionBeside
from polyformer.nn.stack.feature_attention import FeatureAttention
from polyformer.nn.stack.multihead import MultiHeadAttention

HEADS: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_size": 5, "bias": False}
BESIDE = BesideConfig(
    second=SoftmaxConfig(pattern=Window(2, 0)),
    bias=True,
    input_scales=(0.7, 1.3),
    output_scales=(1.9, 0.4),
)
CONFIG = AttentionConfig(**HEADS, mechanism=SSDConfig(short_convolution=2), beside=BESIDE)


def test_a_layer_adds_the_outputs_of_both():
    torch.manual_seed(0)
    both = AttentionBeside(7, CONFIG).double().eval()
    plain = AttentionConfig(**HEADS, mechanism=CONFIG.mechanism)
    first = FeatureAttention(7, plain).double().eval()
    own = {name: x for name, x in both.state_dict().items() if not name.startswith("beside.")}
    first.load_state_dict(own)
    second = MultiHeadAttention(
        7, AttentionConfig(**{**HEADS, "bias": True}, mechanism=BESIDE.second)
    ).double()
    second.load_state_dict(both.beside.state_dict())
    x = torch.randn(2, 9, 7, dtype=torch.float64)
    context, position = Context(9, 9, causal=True), NoPosition()
    y, _ = both(x, context, position)
    expected = 1.9 * first(0.7 * x, context, position)[0] + 0.4 * second(1.3 * x, context, position)[0]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    with recorded() as of_both:
        both(x, context, position)
    with recorded() as of_softmax:
        second(1.3 * x, context, position)
    assert len(of_both) == len(of_softmax) == 1
    torch.testing.assert_close(of_both[0], of_softmax[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": RecurrentConfig()}, "memory: 'recurrent' reads the keys of a layer, which has two kinds"),
        (
            {"depth": DepthConfig.from_dict("act")},
            "depth: 'act' reads the keys of a layer, which has two kinds",
        ),
    ],
)
def test_what_runs_a_layer_in_another_way_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        StackConfig(attention=CONFIG, position=NoPositionConfig(), **options)


def test_options_without_a_meaning_for_two_kinds_are_refused():
    with pytest.raises(InputError, match="value_residual: a layer with attention beside its own has no such"):
        AttentionConfig(**HEADS, value_residual=True, beside=BESIDE)
    linformer = BesideConfig(second=MechanismConfig.from_dict("linformer"))
    with pytest.raises(InputError, match="mechanism 'linformer' cannot run in a decoder"):
        AttentionConfig(**HEADS, mechanism=SSDConfig(), beside=linformer)
    with pytest.raises(InputError, match=r"beside: expected a recurrence such as 'ssd' .* got 'softmax'"):
        AttentionConfig(**HEADS, beside=BesideConfig(second=SSDConfig()))


def test_positions_that_change_scores_are_refused():
    with pytest.raises(InputError, match="mechanism 'ssd' cannot use a position scheme that changes"):
        build_stack(StackConfig(attention=CONFIG, position=AlibiConfig()), 7, 9)


def test_a_sequence_is_not_spread_over_processes():
    """Each kind alone can be; both together were not tried."""
    model = create_model("decoder-tiny", num_attention_heads=4)
    decoder = dataclasses.replace(
        model.config.decoder,
        attention=dataclasses.replace(
            model.config.decoder.attention, mechanism=SSDConfig(), beside=BesideConfig()
        ),
    )
    both = Transformer(dataclasses.replace(model.config, decoder=decoder))
    with (
        use_context_parallel(ContextParallel(None, 0, 1)),
        pytest.raises(InputError, match="beside: 'softmax' does not support context parallelism"),
    ):
        both(torch.ones(1, 4, dtype=torch.long))
