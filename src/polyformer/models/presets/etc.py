"""ETC: global and long tokens in one row, with relative labels and no absolute positions.

Rows come from `polyformer.data.structured`, which needs the model's number of global tokens.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import ETC
from polyformer.attention.positions import EtcLabelsConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def etc(layers: int, width: int, heads: int, vocab: int, pattern: ETC, max_distance: int) -> ModelConfig:
    """Post-norm as BERT, with the token types global (0) and long (1)."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        embedding=EmbeddingConfig(normed=True, type_vocab_size=2),
        encoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(num_attention_heads=heads, mechanism=SoftmaxConfig(pattern=pattern)),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu"),
            position=EtcLabelsConfig(global_tokens=pattern.global_tokens, max_distance=max_distance),
            norm=LayerNormConfig(eps=1e-12),
        ),
        head=MaskedConfig(),
        initializer_range=0.02,
    )


@register("etc-base")
def etc_base() -> ModelConfig:
    """ETC encoder for 4096 tokens and 256 global ones: 12 layers of 768 (Ainslie et al. 2020, section 4).

    The radius is 84. Labels are clipped at 12 tokens, and a global token sees its own sentence alone, as in
    the released models of this size. Those have an output projection for each of the two parts, and 16
    token types; here all is shared.
    """
    return etc(12, 768, 12, vocab=30522, pattern=ETC(256, 84, hard_g2l=True), max_distance=12)


@register("etc-tiny")
def etc_tiny() -> ModelConfig:
    """ETC encoder for tests: 2 layers of 32 and 8 global tokens.

    The second layer reads what the first gathered in the global tokens.
    """
    return etc(2, 32, 2, vocab=300, pattern=ETC(8, 4, hard_g2l=True), max_distance=3)
