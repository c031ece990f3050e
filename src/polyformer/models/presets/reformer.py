"""Reformer: reversible layers, local and LSH attention in turn, axial positions. Kitaev et al. 2020."""

from polyformer.attention.mechanisms import AlternateConfig, LSHConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import BlockWindow
from polyformer.attention.positions import AxialConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register
from polyformer.nn.block import ReversibleConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def reformer(
    mechanisms: tuple[MechanismConfig, ...],
    width: int,
    heads: int,
    head: int,
    inner: int,
    vocab: int,
    grid: tuple[int, int],
) -> ModelConfig:
    """A decoder; its head reads both streams side by side."""
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


def local(chunk: int, before: int = 1, dropout: float = 0.05) -> SoftmaxConfig:
    """A token sees its chunk up to itself and `before` chunks before."""
    return SoftmaxConfig(pattern=BlockWindow(chunk, before, 0), dropout=dropout)


def hashed(chunk: int, before: int = 1, rounds: int = 1, buckets: int = 128) -> LSHConfig:
    """As many keys as the chunks would hold, and all in a text of one chunk."""
    return LSHConfig(
        rounds=rounds, buckets=buckets, window=(1 + before) * chunk, whole=chunk, unscaled=True, key_eps=1e-6
    )


@register("reformer-small")
def reformer_small() -> ModelConfig:
    """Reformer language model for texts of 2^19 tokens: 6 layers of 256 (Kitaev et al. 2020).

    The released checkpoint is google/reformer-crime-and-punishment. Buckets of LSH are 128 here, in place
    of 64 times 128.
    """
    layers = (local(64), hashed(64)) * 3
    return reformer(layers, 256, 2, 64, 512, vocab=320, grid=(512, 1024))


@register("reformer-enwik8")
def reformer_enwik8() -> ModelConfig:
    """Reformer language model of enwik8's bytes: 12 layers of 1024 (Kitaev et al. 2020, section 5).

    The released checkpoint, google/reformer-enwik8, has 149M parameters.
    """
    near, far = local(128, dropout=0.2), hashed(256, rounds=4, buckets=512)
    layers = (near, near, far, near) * 3
    return reformer(layers, 1024, 8, 128, 4096, vocab=258, grid=(128, 512))
