"""T5: an encoder-decoder for every task as text. Raffel et al. 2020; version 1.1: Xue et al. 2021.

Pre-norm with RMS norms, no biases, bucketed distances, unscaled scores, dropout also inside the
feed-forward and after the final norm. Fresh weights are normal with a deviation of 0.02, which keeps unscaled
scores small; T5 derives the deviation of each matrix from its width.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import T5BiasConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig, FeedForwardConfig, GatedConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def relu(size: int) -> FeedForwardConfig:
    """Return the feed-forward of the first version."""
    return DenseConfig(intermediate_size=size, bias=False, inner_dropout=0.1)


def gated_gelu(size: int) -> FeedForwardConfig:
    """Return the feed-forward of version 1.1."""
    return GatedConfig(intermediate_size=size, activation="gelu_tanh", inner_dropout=0.1)


T5 = {  # layers, width, heads, feed-forward, width of a head
    "t5-small": ((6, 512, 8, relu(2048)), "60.5M", "3.7"),  # the paper says about 60 million parameters
    "t5-base": ((12, 768, 12, relu(3072)), "223M", "3.1.1"),  # the paper says about 220 million
    "t5-large": ((24, 1024, 16, relu(4096)), "738M", "3.7"),  # the paper says 770 million
    "t5-3b": ((24, 1024, 32, relu(16384), 128), "2.85B", "3.7"),
    "t5-11b": ((24, 1024, 128, relu(65536), 128), "11.3B", "3.7"),
}
V1_1 = {
    "t5-v1_1-small": ((8, 512, 6, gated_gelu(1024), 64, False), "77M"),
    "t5-v1_1-base": ((12, 768, 12, gated_gelu(2048), 64, False), "248M"),
}


@register_sizes(
    "T5 encoder-decoder: {layers} + {layers} layers of {width}, {} parameters "
    "(Raffel et al. 2020, section {}).",
    T5,
)
@register_sizes(
    "T5 version 1.1, and Flan-T5: {layers} + {layers} layers of {width}, gated GELU, untied output, "
    "{} parameters.",
    V1_1,
)
def t5(
    layers: int,
    width: int,
    heads: int,
    feedforward: FeedForwardConfig,
    head_size: int = 64,
    tied: bool = True,
) -> ModelConfig:
    """Return equal stacks with dropout of 0.1; a tied output layer reads scaled states."""
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(
            num_attention_heads=heads,
            head_size=head_size,
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
