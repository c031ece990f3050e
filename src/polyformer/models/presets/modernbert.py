"""ModernBERT: pre-norm encoder without biases, two layers of a window between those of the whole text.

Rotary positions with another base for each kind of layer, GeGLU, texts of 8192 tokens. Warner et al. 2024.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.patterns.implied import Full
from polyformer.attention.positions import RopeConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import GatedConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

EPS = 1e-5
GLOBAL, LOCAL = 160_000.0, 10_000.0
"""The bases of both kinds of layers."""


def modernbert(layers: int, width: int, heads: int, inner: int) -> ModelConfig:
    """A layer that sees all, two that see 64 tokens to either side, and so on."""
    near = Window(64, 64)
    return ModelConfig(
        vocab_size=50368,
        hidden_size=width,
        max_position_embeddings=8192,
        embedding=EmbeddingConfig(normed=True, embedding_dropout=0.0),
        encoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(
                num_attention_heads=heads,
                bias=False,
                mechanism=SoftmaxConfig(pattern=PerLayer((Full(), near, near))),
            ),
            feedforward=GatedConfig(intermediate_size=inner, activation="gelu"),
            position=RopeConfig(bases=(GLOBAL, LOCAL, LOCAL)),
            block=PreNormConfig(first_norm=False),
            norm=LayerNormConfig(eps=EPS, bias=False),
            dropout=0.0,
        ),
        head=MaskedConfig(eps=EPS, dense_bias=False, norm_bias=False),
        special=SpecialTokens(pad=50283, bos=50281, eos=50282),
        initializer_range=0.02,
    )


@register("modernbert-base")
def modernbert_base() -> ModelConfig:
    """ModernBERT encoder: 22 layers of 768, two in three of them local (Warner et al. 2024, table 4)."""
    return modernbert(22, 768, 12, 1152)


@register("modernbert-large")
def modernbert_large() -> ModelConfig:
    """ModernBERT encoder: 28 layers of 1024, two in three of them local (Warner et al. 2024, table 4)."""
    return modernbert(28, 1024, 16, 2624)
