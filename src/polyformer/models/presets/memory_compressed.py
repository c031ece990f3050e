"""T-DMCA: a decoder for long inputs with alternating local and memory-compressed layers. Liu et al. 2018."""

from polyformer.attention.mechanisms import AlternateConfig, MemoryCompressedConfig, SoftmaxConfig
from polyformer.attention.patterns import BlockWindow
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register_sizes
from polyformer.nn.feedforward import AlternateFeedForwardConfig, DenseConfig, ExpertsConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

SIZES = {  # layers, width, heads, inner width, block, experts (the paper has 128 or 256), vocabulary
    "t-dmca-small": (
        (5, 256, 8, 1024, 256, 8, 8000),
        "a CPU: 5 layers of 256, local and memory-compressed (Liu et al. 2018)",
    ),
    "t-dmca-tiny": ((2, 32, 2, 64, 8, 4, 300), "tests: two layers of 32, blocks of 8 tokens"),
}


@register_sizes("T-DMCA decoder for {}.", SIZES)
def t_dmca(
    layers: int, width: int, heads: int, inner: int, block: int, experts: int, *, vocab: int
) -> ModelConfig:
    """Return layers L M L M L: L attends within blocks of `block` tokens, M has `experts` experts.

    Post-norm and sinusoids, as in Vaswani et al. 2017.
    """
    dense = DenseConfig(intermediate_size=inner)
    local = SoftmaxConfig(pattern=BlockWindow(block, 0, 0))
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        embedding=EmbeddingConfig(scaled=False),  # later defaults would change the results of earlier runs
        decoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(
                num_attention_heads=heads,
                mechanism=AlternateConfig(mechanisms=(local, MemoryCompressedConfig())),
            ),
            feedforward=AlternateFeedForwardConfig(
                feedforwards=(dense, ExpertsConfig(expert=dense, experts=experts))
            ),
        ),
        initializer_range=None,
    )
