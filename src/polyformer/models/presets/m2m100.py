"""M2M-100: one model between a hundred languages; the first token written says which. Fan et al. 2021.

Pre-norm, ReLU, scaled tokens and tensor2tensor's sinusoids from position 2; layers are left out in training.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import SinusoidalConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def m2m100(layers: int, intermediate: int) -> ModelConfig:
    """Equal stacks of 1024 with 16 heads, and 128112 tokens, languages among them."""
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(num_attention_heads=16, mechanism=SoftmaxConfig(dropout=0.1)),
        feedforward=DenseConfig(intermediate_size=intermediate),
        position=SinusoidalConfig(layout="halves", inclusive=True, offset=2),
        block=PreNormConfig(finite=True),
        layerdrop=0.05,
    )
    return ModelConfig(
        vocab_size=128112,
        hidden_size=1024,
        max_position_embeddings=1024,
        embedding=EmbeddingConfig(scaled=True),
        encoder=stack,
        decoder=stack,
        head=LanguageModelConfig(),
        special=SpecialTokens(pad=1, bos=2, eos=2),
        initializer_range=0.02,
    )


@register("m2m100-418m")
def m2m100_418m() -> ModelConfig:
    """M2M-100, 100 languages: 12 + 12 layers of 1024, 484M parameters, called 418M (Fan et al. 2021)."""
    return m2m100(12, 4096)


@register("m2m100-1.2b")
def m2m100_1_2b() -> ModelConfig:
    """M2M-100, 100 languages: 24 + 24 layers of 1024, 1239M parameters (Fan et al. 2021)."""
    return m2m100(24, 8192)
