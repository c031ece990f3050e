"""Policies: GTrXL and the baselines of its comparison, in sizes for a CPU. Parisotto et al. 2019.

The paper's model, `gtrxl-dmlab30`, trains for a billion steps. The environment of a task sets the sizes of
observations and the number of actions.
"""

from polyformer.models.architectures import PolicyConfig
from polyformer.models.architectures.policy import (
    DecoderTrunkConfig,
    FeedForwardTrunkConfig,
    LSTMTrunkConfig,
    TrunkConfig,
)
from polyformer.models.presets.base import overridden, register_sizes

PUBLISHED = {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "memory_length": 512,
}
POST_NORM = DecoderTrunkConfig().override("block", "post").override("intermediate_size", 196)
SIZES = {  # width, trunk; all for a CPU have about as many parameters
    # The paper counts 66.4M, with the layers that read images.
    "gtrxl-dmlab30": (
        (512, overridden(DecoderTrunkConfig(), PUBLISHED)),
        "GTrXL policy: 12 layers of 512, 8 heads, a memory of 512 steps (Parisotto et al. 2019, section 4)",
    ),
    "gtrxl": (
        (64, DecoderTrunkConfig()),
        "GTrXL policy: 1 layer of 64, 2 heads, a memory of 32 steps (Parisotto et al. 2019, section 3)",
    ),
    "policy-transformer-xl": (
        (98, POST_NORM),
        "Transformer-XL policy for comparison with gtrxl: post-norm, without gates, of similar size",
    ),
    "policy-lstm": ((104, LSTMTrunkConfig()), "LSTM policy for comparison with gtrxl, of similar size"),
    "policy-feedforward": (
        (206, FeedForwardTrunkConfig()),
        "Feed-forward policy for comparison with gtrxl: without a memory, of similar size",
    ),
}


@register_sizes("{}.", SIZES)
def policy(width: int, trunk: TrunkConfig) -> PolicyConfig:
    """Return a policy of this width around `trunk`."""
    return PolicyConfig(hidden_size=width, trunk=trunk)
