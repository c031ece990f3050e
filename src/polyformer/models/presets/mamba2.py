"""Mamba-2: state space layers without feed-forwards and without positions. Dao and Gu 2024."""

from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.attention.mechanisms.recurrence.members import SSDConfig
from polyformer.attention.positions.added import NoPositionConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import NoFeedForwardConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

MAMBA_2 = {  # layers, width, heads, groups, vocabulary, tied
    "mamba2-130m": ((24, 768, 24, 1, 50288, True), "129M"),
    "mamba-codestral-7b": ((64, 4096, 128, 8, 32768, False), "7.3B"),
}


@register_sizes("Mamba-2 decoder: {layers} layers of {width}, {} parameters (Dao and Gu 2024).", MAMBA_2)
def mamba_2(layers: int, width: int, heads: int, groups: int, vocab: int, tied: bool) -> ModelConfig:
    """Return layers with values twice as wide as the model, in heads of 64, and keys of 128 per group."""
    own = RecurrentHeadsConfig(key_heads=groups, value_heads=heads, key_size=128, value_size=64)
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=8192,
        embedding=EmbeddingConfig(tied=tied),
        decoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(
                num_attention_heads=heads,
                head_size=64,
                bias=False,
                mechanism=SSDConfig(convolution_bias=True, heads=own),
            ),
            feedforward=NoFeedForwardConfig(),
            position=NoPositionConfig(),
            block=PreNormConfig(),
            norm=RMSNormConfig(eps=1e-5),
            dropout=0.0,
        ),
        special=SpecialTokens(pad=0, bos=0, eos=0) if tied else SpecialTokens(pad=1, bos=0, eos=2),
        initializer_range=0.1,
    )
