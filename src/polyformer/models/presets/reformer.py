"""Reformer: reversible layers, alternating local and LSH attention, axial positions. Kitaev et al. 2020."""

from polyformer.attention.mechanisms import AlternateConfig, LSHConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import BlockWindow
from polyformer.attention.positions import AxialConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import ReversibleConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def local(chunk: int, before: int = 1, dropout: float = 0.05) -> SoftmaxConfig:
    """Return causal attention within a token's chunk and `before` chunks before it."""
    return SoftmaxConfig(pattern=BlockWindow(chunk, before, 0), dropout=dropout)


def hashed(chunk: int, before: int = 1, rounds: int = 1, buckets: int = 128) -> LSHConfig:
    """Return LSH attention over as many keys as the chunks hold; a text of one chunk uses full attention."""
    return LSHConfig(
        rounds=rounds, buckets=buckets, window=(1 + before) * chunk, whole=chunk, unscaled=True, key_eps=1e-6
    )


NEAR, FAR = local(128, dropout=0.2), hashed(256, rounds=4, buckets=512)
SIZES = {  # mechanisms, width, heads, head size, inner width, vocabulary, grid
    # google/reformer-crime-and-punishment, which has 64 times 128 buckets
    "reformer-small": (
        ((local(64), hashed(64)) * 3, 256, 2, 64, 512, 320, (512, 1024)),
        "for texts of 2^19 tokens: 6 layers of 256",
        "",
    ),
    # google/reformer-enwik8, 149M parameters
    "reformer-enwik8": (
        ((NEAR, NEAR, FAR, NEAR) * 3, 1024, 8, 128, 4096, 258, (128, 512)),
        "of enwik8's bytes: 12 layers of 1024",
        ", section 5",
    ),
}


@register_sizes("Reformer language model {} (Kitaev et al. 2020{}).", SIZES)
def reformer(
    mechanisms: tuple[MechanismConfig, ...],
    width: int,
    heads: int,
    head: int,
    inner: int,
    *,
    vocab: int,
    grid: tuple[int, int],
) -> ModelConfig:
    """Return a decoder with one layer per mechanism; its head reads both streams concatenated."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=grid[0] * grid[1],
        embedding=EmbeddingConfig(tied=False),
        decoder=StackConfig(
            num_hidden_layers=len(mechanisms),
            attention=AttentionConfig(
                num_attention_heads=heads,
                head_size=head,
                bias=False,
                mechanism=AlternateConfig(mechanisms=mechanisms),
            ),
            feedforward=DenseConfig(intermediate_size=inner, activation="relu", inner_dropout=0.05),
            position=AxialConfig(grid=grid),
            block=ReversibleConfig(join="concat"),
            norm=LayerNormConfig(eps=1e-12),
            dropout=0.05,
            final_dropout=0.05,
        ),
        initializer_range=0.02,
    )
