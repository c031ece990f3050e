"""M2M-100: one model for 100 languages; the first output token selects the language. Fan et al. 2021.

Pre-norm, ReLU, scaled tokens and tensor2tensor's sinusoids from position 2; layer dropout in training.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import SinusoidalConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

SIZES = {  # layers, width, inner width
    "m2m100-418m": ((12, 1024, 4096), "484M parameters, called 418M"),
    "m2m100-1.2b": ((24, 1024, 8192), "1239M parameters"),
    "m2m100-12b": ((24, 4096, 16384), "11.8B parameters, called 12B"),
}


@register_sizes("M2M-100, 100 languages: {layers} + {layers} layers of {width}, {} (Fan et al. 2021).", SIZES)
def m2m100(layers: int, width: int, intermediate: int) -> ModelConfig:
    """Return equal stacks with 16 heads, and 128112 tokens including one for each language."""
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
        hidden_size=width,
        max_position_embeddings=1024,
        embedding=EmbeddingConfig(scaled=True),
        encoder=stack,
        decoder=stack,
        head=LanguageModelConfig(),
        special=SpecialTokens(pad=1, bos=2, eos=2),
        initializer_range=0.02,
    )
