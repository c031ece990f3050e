"""T-DMCA: a decoder of long inputs, local and memory-compressed layers in turn. Liu et al. 2018."""

from polyformer.attention.mechanisms import AlternateConfig, MemoryCompressedConfig, SoftmaxConfig
from polyformer.attention.patterns import BlockWindow
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register
from polyformer.nn.feedforward import AlternateFeedForwardConfig, DenseConfig, ExpertsConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def t_dmca(
    layers: int, width: int, heads: int, inner: int, block: int, experts: int, vocab: int
) -> ModelConfig:
    """Layers L M L M L, L within blocks of `block` tokens; in the M layers the feed-forward is `experts`.

    Post-norm and sinusoids, as the paper's decoder has them from Vaswani et al. 2017.
    """
    dense = DenseConfig(intermediate_size=inner)
    local = SoftmaxConfig(pattern=BlockWindow(block, 0, 0))
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        embedding=EmbeddingConfig(scaled=False),  # as runs of this preset began
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


@register("t-dmca-small")
def t_dmca_small() -> ModelConfig:
    """T-DMCA decoder for a CPU: 5 layers of 256, local and memory-compressed (Liu et al. 2018).

    As in section 4.2.5: layers L M L M L, with 8 experts in place of 128 or 256.
    """
    return t_dmca(5, 256, 8, 1024, block=256, experts=8, vocab=8000)


@register("t-dmca-tiny")
def t_dmca_tiny() -> ModelConfig:
    """T-DMCA decoder for tests: two layers of 32, blocks of 8 tokens.

    As in section 4.2.5 of Liu et al. 2018.
    """
    return t_dmca(2, 32, 2, 64, block=8, experts=4, vocab=300)
