"""Policies: GTrXL and what it is compared with, in sizes for a processor. Parisotto et al. 2019.

The paper's have 12 layers, and its tasks take a billion steps. Sizes of observations and the number of
actions are the environment's once a task is named.
"""

from polyformer.models.architectures import PolicyConfig
from polyformer.models.architectures.trunks import DecoderTrunkConfig, FeedForwardTrunkConfig, LSTMTrunkConfig
from polyformer.models.presets.base import register


@register("gtrxl")
def gtrxl() -> PolicyConfig:
    """GTrXL policy: 1 layer of 64, 2 heads, a memory of 32 steps (Parisotto et al. 2019, section 3)."""
    return PolicyConfig()


@register("policy-transformer-xl")
def transformer_xl() -> PolicyConfig:
    """Transformer-XL policy for comparison with gtrxl: post-norm, without gates, of similar size."""
    trunk = DecoderTrunkConfig().override("block", "post").override("intermediate_size", 196)
    return PolicyConfig(hidden_size=98, trunk=trunk)


@register("policy-lstm")
def lstm() -> PolicyConfig:
    """LSTM policy for comparison with gtrxl, of similar size."""
    return PolicyConfig(hidden_size=104, trunk=LSTMTrunkConfig())


@register("policy-feedforward")
def feedforward() -> PolicyConfig:
    """Feed-forward policy for comparison with gtrxl: without a memory, of similar size."""
    return PolicyConfig(hidden_size=206, trunk=FeedForwardTrunkConfig())
