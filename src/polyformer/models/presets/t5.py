"""T5: an encoder-decoder for every task as text. Raffel et al. 2020; version 1.1: Xue et al. 2021.

Pre-norm with RMS norms, no biases, buckets of distances, no scale of the scores, dropout inside the
feed-forward and after the final norm too. Fresh weights are ours (normal, 0.02), which keep unscaled scores
small; T5 starts each matrix from its own width.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import T5BiasConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig, FeedForwardConfig, GatedConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def t5(layers: int, width: int, heads: int, feedforward: FeedForwardConfig, tied: bool = True) -> ModelConfig:
    """Equal stacks with heads of 64 and dropout of 0.1; a tied output layer reads scaled states."""
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(
            num_attention_heads=heads,
            head_size=64,
            bias=False,
            mechanism=SoftmaxConfig(scale=1.0, dropout=0.1),
        ),
        feedforward=feedforward,
        position=T5BiasConfig(),
        block=PreNormConfig(finite=True),
        norm=RMSNormConfig(eps=1e-6),
        final_dropout=0.1,
    )
    return ModelConfig(
        vocab_size=32128,
        hidden_size=width,
        embedding=EmbeddingConfig(tied=tied),
        encoder=stack,
        decoder=stack,
        head=LanguageModelConfig(scaled=tied),
        special=SpecialTokens(pad=0, bos=0, eos=1),
        initializer_range=0.02,
    )


def relu(size: int) -> FeedForwardConfig:
    """The feed-forward of the first version."""
    return DenseConfig(intermediate_size=size, bias=False, inner_dropout=0.1)


def gated_gelu(size: int) -> FeedForwardConfig:
    """The feed-forward of version 1.1."""
    return GatedConfig(intermediate_size=size, activation="gelu_tanh", inner_dropout=0.1)


@register("t5-small")
def t5_small() -> ModelConfig:
    """T5 encoder-decoder: 6 + 6 layers of 512, 60.5M parameters (Raffel et al. 2020, section 3.7).

    The paper says about 60 million parameters.
    """
    return t5(6, 512, 8, relu(2048))


@register("t5-base")
def t5_base() -> ModelConfig:
    """T5 encoder-decoder: 12 + 12 layers of 768, 223M parameters (Raffel et al. 2020, section 3.1.1).

    The paper says about 220 million parameters.
    """
    return t5(12, 768, 12, relu(3072))


@register("t5-large")
def t5_large() -> ModelConfig:
    """T5 encoder-decoder: 24 + 24 layers of 1024, 738M parameters (Raffel et al. 2020, section 3.7).

    The paper says 770 million parameters.
    """
    return t5(24, 1024, 16, relu(4096))


@register("t5-v1_1-base")
def t5_v1_1_base() -> ModelConfig:
    """T5 version 1.1, and Flan-T5: 12 + 12 layers of 768, gated GELU, untied output, 248M parameters."""
    return t5(12, 768, 12, gated_gelu(2048), tied=False)
