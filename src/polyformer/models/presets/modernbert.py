"""ModernBERT: pre-norm encoder without biases, two windowed layers after each layer of full attention.

Rotary positions with a different base for each kind of layer, GeGLU, 8192 tokens. Warner et al. 2024.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.patterns.implied import Full
from polyformer.attention.positions import RopeConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import GatedConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

EPS = 1e-5
GLOBAL, LOCAL = 160_000.0, 10_000.0
"""The RoPE bases of layers with full attention and of windowed layers."""


SIZES = {  # layers, width, heads, inner width
    "modernbert-base": ((22, 768, 12, 1152),),
    "modernbert-large": ((28, 1024, 16, 2624),),
}


@register_sizes(
    "ModernBERT encoder: {layers} layers of {width}, two in three of them local "
    "(Warner et al. 2024, table 4).",
    SIZES,
)
def modernbert(layers: int, width: int, heads: int, inner: int) -> ModelConfig:
    """Return a repeating group of a layer with full attention and two with 64 tokens on either side."""
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
