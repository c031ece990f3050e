"""The encoder-decoder of 2017. Vaswani et al. 2017, table 3."""

from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import BlockConfig, PostNormConfig, PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

POST_NORM = PostNormConfig()
TRANSFORMER = {  # layers, width, heads, inner width, dropout, vocabulary
    "transformer-base": ((6, 512, 8, 2048, 0.1, 37000), "base", "65M"),
    "transformer-big": ((6, 1024, 16, 4096, 0.3, 37000), "big", "213M"),
}
SMALL = {
    "transformer-small": (
        (3, 256, 4, 1024, 0.1, 8000, PreNormConfig()),
        "a CPU: 3 + 3 layers of 256, pre-norm, which trains without warm-up",
    ),
    "transformer-tiny": ((1, 32, 4, 64, 0.1, 300, POST_NORM, 128), "tests: one layer of each"),
}


@register_sizes(
    "The Transformer of 2017, {}: {layers} + {layers} layers of {width} "
    "(Vaswani et al. 2017, table 3: {} parameters).",
    TRANSFORMER,
)
@register_sizes("Encoder-decoder for {}.", SMALL)
def encoder_decoder(
    layers: int,
    width: int,
    heads: int,
    intermediate: int,
    dropout: float,
    vocab: int,
    *,
    block: BlockConfig = POST_NORM,
    positions: int = 512,
) -> ModelConfig:
    """Return equal stacks with sinusoids and one token table for inputs of both stacks and the output."""
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(num_attention_heads=heads),
        feedforward=DenseConfig(intermediate_size=intermediate),
        dropout=dropout,
        block=block,
    )
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=positions,
        embedding=EmbeddingConfig(scaled=True),
        encoder=stack,
        decoder=stack,
        head=LanguageModelConfig(label_smoothing=0.1),
        special=SpecialTokens(pad=0, bos=1, eos=2),
    )
