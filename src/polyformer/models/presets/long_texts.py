"""Systems for long texts: Longformer, BigBird, ETC and Reformer.

Longformer (Beltagy et al. 2020) has windows and marked global tokens; BigBird (Zaheer et al. 2020) a window
of blocks, random blocks and global tokens; ETC (Ainslie et al. 2020) global and long tokens in one row, with
relative labels and no absolute positions (its rows come from `polyformer.data.rows.structured`, which needs
the model's number of global tokens); Reformer (Kitaev et al. 2020) reversible layers, alternating local and
LSH attention, and axial positions.
"""

import dataclasses
from dataclasses import dataclass

from polyformer.attention.mechanisms import AlternateConfig, LSHConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import (
    ETC,
    BlockWindow,
    Global,
    GlobalEnd,
    Marked,
    Pattern,
    PerHead,
    PerLayer,
    Random,
    Whole,
    Window,
)
from polyformer.attention.positions import AxialConfig, EtcLabelsConfig, LearnedConfig, PositionConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import (
    Preset,
    SizedPreset,
    model_config,
    register_presets,
    size_options,
)
from polyformer.nn.block import PreNormConfig, ReversibleConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


@dataclass(frozen=True, kw_only=True)
class LongformerPreset(SizedPreset):
    """RoBERTa with `pattern` instead of full attention and separate projections for global tokens.

    Args:
        positions: the largest number of tokens.
        pattern: the windows and the global tokens.
    """

    vocabulary: int
    positions: int
    pattern: Pattern

    def config(self) -> ModelConfig:
        changes = {
            **size_options(self.layers, self.width, self.heads),
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "mechanism": SoftmaxConfig(pattern=self.pattern, dropout=0.1),
            "global_projections": True,
        }
        return model_config("roberta-base", changes)


GROWING = PerLayer((Window(2) | Global(1) | Marked(), Window(4) | Global(1) | Marked()))
"""Windows that differ from layer to layer, for tests."""

register_presets(
    # allenai/longformer-base-4096, 149M parameters. `global_attention_mask` marks the global tokens; with
    # `marks_first` the head `classify` marks the first token.
    LongformerPreset(
        "longformer-base",
        "Longformer encoder: RoBERTa-base with windows of 512, 4096 tokens (Beltagy et al. 2020, section 5).",
        layers=12,
        width=768,
        heads=12,
        vocabulary=50265,
        positions=4096,
        pattern=Window(256) | Marked(),
    ),
    LongformerPreset(
        "longformer-tiny",
        "Longformer encoder for tests: two layers of 32 with different windows.",
        layers=2,
        width=32,
        heads=2,
        vocabulary=300,
        positions=64,
        pattern=GROWING,
    ),
)


def dilated(reach: int, dilation: int) -> Pattern:
    """Return a window over the last `reach` + 1 tokens; two of eight heads are dilated."""
    near, far = Window(reach, 0), Window(reach, 0, dilation)
    return PerHead((far, far, *[near] * 6))


@dataclass(frozen=True, kw_only=True)
class LongformerDecoderPreset(SizedPreset):
    """A pre-norm decoder with sinusoids at the input; the paper uses Transformer-XL's positions.

    Args:
        pattern: the causal windows of each layer.
    """

    vocabulary: int
    pattern: Pattern

    def config(self) -> ModelConfig:
        changes = {
            **size_options(self.layers, self.width, self.heads),
            "vocab_size": self.vocabulary,
            "attention": self.pattern,
            "position": "sinusoidal",
            "activation": "gelu",
            "embedding.scaled": False,  # later defaults would change the results of earlier runs
        }
        return model_config("decoder-small", changes)


# Windows grow from the bottom layer to the top, and in the upper half two heads are dilated.
DILATED = PerLayer((Window(31, 0), Window(63, 0), dilated(127, 2), dilated(127, 3)))
"""The windows of section 4.1, for four layers."""

register_presets(
    LongformerDecoderPreset(
        "longformer-decoder-small",
        "Longformer decoder for a CPU: 4 layers of 256 with causal windows "
        "(Beltagy et al. 2020, section 4.1).",
        layers=4,
        width=256,
        heads=8,
        vocabulary=8000,
        pattern=DILATED,
    ),
)


def bigbird_pattern(layers: int, block: int, random: int) -> Pattern:
    """Return BigBird's ITC form; texts shorter than all its blocks together use full attention.

    Seeds differ from layer to layer, so that layers join other blocks, and are the same for every length.
    """
    whole = Whole((5 + 2 * random) * block)
    fixed = whole | BlockWindow(block) | Global(block) | GlobalEnd(block)
    return PerLayer(tuple(fixed | Random(random, block, seed=layer) for layer in range(layers)))


def etc_pattern(layers: int, block: int, random: int) -> Pattern:
    """Return BigBird's ETC form: a window and random blocks of long tokens, with 256 global tokens."""
    fixed = BlockWindow(block) | Global(256)
    return PerLayer(tuple(fixed | Random(random, block, seed=layer) for layer in range(layers)))


@dataclass(frozen=True, kw_only=True)
class BigBirdPreset(Preset):
    """RoBERTa's sizes with the vocabulary of google/bigbird-roberta-base, for 4096 tokens."""

    pattern: Pattern
    position: PositionConfig

    def config(self) -> ModelConfig:
        changes = {
            "vocab_size": 50358,
            "max_position_embeddings": 4096,
            "attention": self.pattern,
            "position": self.position,
            "activation": "gelu_tanh",
            "embedding.scaled": False,
        }
        return model_config("bert-base", changes)


register_presets(
    # google/bigbird-roberta-base. Blocks of 64; the first and the last block are global, a window of three,
    # and three random blocks, which see each other here and in one direction only there. Texts of at most 704
    # tokens use full attention, as there.
    BigBirdPreset(
        "bigbird-base",
        "BigBird encoder, ITC form, for 4096 tokens: 12 layers of 768 (Zaheer et al. 2020, appendix E.1).",
        pattern=bigbird_pattern(12, 64, 3),
        position=LearnedConfig(),
    ),
    # Blocks of 84 and a window of three; positions are ETC's labels.
    BigBirdPreset(
        "bigbird-etc-base",
        "BigBird encoder, ETC form, 256 global tokens: 12 layers of 768 (Zaheer et al. 2020, appendix E.1).",
        pattern=etc_pattern(12, 84, 3),
        position=EtcLabelsConfig(global_tokens=256, max_distance=12),
    ),
)


@dataclass(frozen=True, kw_only=True)
class BigBirdPegasusPreset(SizedPreset):
    """Pegasus' pre-norm layers with learned positions, BigBird's pattern in the encoder.

    Args:
        block: the number of tokens of a block.
        random_blocks: the number of random blocks that a block attends to.
    """

    vocabulary: int
    block: int
    random_blocks: int

    def config(self) -> ModelConfig:
        decoder = StackConfig(
            num_hidden_layers=self.layers,
            attention=AttentionConfig(num_attention_heads=self.heads, bias=False),
            feedforward=DenseConfig(intermediate_size=4 * self.width, activation="gelu_tanh"),
            position=LearnedConfig(),
            block=PreNormConfig(),
        )
        pattern = bigbird_pattern(self.layers, self.block, self.random_blocks)
        attention = dataclasses.replace(decoder.attention, mechanism=SoftmaxConfig(pattern=pattern))
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            max_position_embeddings=4096,
            embedding=EmbeddingConfig(scaled=True),
            encoder=dataclasses.replace(decoder, attention=attention, block=PreNormConfig(finite=True)),
            decoder=decoder,
            head=LanguageModelConfig(bias=True, frozen_bias=True),
            special=SpecialTokens(pad=0, bos=2, eos=1),
            initializer_range=0.02,
        )


register_presets(
    # google/bigbird-pegasus-large-arxiv, -pubmed and -bigpatent
    BigBirdPegasusPreset(
        "bigbird-pegasus-large",
        "BigBird-Pegasus summarizer, 16 + 16 layers of 1024, 577M parameters (Zaheer et al. 2020).",
        layers=16,
        width=1024,
        heads=16,
        vocabulary=96103,
        block=64,
        random_blocks=3,
    ),
    BigBirdPegasusPreset(
        "bigbird-pegasus-small",
        "BigBird-Pegasus summarizer, 2 + 2 layers of 256, for a CPU (Zaheer et al. 2020).",
        layers=2,
        width=256,
        heads=4,
        vocabulary=8000,
        block=16,
        random_blocks=2,
    ),
)


@dataclass(frozen=True, kw_only=True)
class EtcEncoderPreset(SizedPreset):
    """A post-norm encoder as BERT, with the token types global (0) and long (1).

    Args:
        pattern: the global tokens and the window of long tokens.
        max_distance: the largest distance with a label of its own.
    """

    vocabulary: int
    pattern: ETC
    max_distance: int

    def config(self) -> ModelConfig:
        labels = EtcLabelsConfig(global_tokens=self.pattern.global_tokens, max_distance=self.max_distance)
        changes = {
            **size_options(self.layers, self.width, self.heads),
            "vocab_size": self.vocabulary,
            "attention": self.pattern,
            "position": labels,
        }
        return model_config("bert-base", changes)


register_presets(
    # The released models of this size have an output projection for each of both parts, and 16 token types.
    EtcEncoderPreset(
        "etc-base",
        "ETC encoder for 4096 tokens and 256 global ones: 12 layers of 768 (Ainslie et al. 2020, section 4).",
        layers=12,
        width=768,
        heads=12,
        vocabulary=30522,
        pattern=ETC(256, 84, hard_g2l=True),
        max_distance=12,
    ),
    EtcEncoderPreset(
        "etc-tiny",
        "ETC encoder for tests: 2 layers of 32 and 8 global tokens.",
        layers=2,
        width=32,
        heads=2,
        vocabulary=300,
        pattern=ETC(8, 4, hard_g2l=True),
        max_distance=3,
    ),
)


def local(chunk: int, before: int = 1, dropout: float = 0.05) -> SoftmaxConfig:
    """Return causal attention within a token's chunk and `before` chunks before it."""
    return SoftmaxConfig(pattern=BlockWindow(chunk, before, 0), dropout=dropout)


def hashed(chunk: int, before: int = 1, rounds: int = 1, buckets: int = 128) -> LSHConfig:
    """Return LSH attention over as many keys as the chunks hold; a text of one chunk uses full attention."""
    return LSHConfig(
        rounds=rounds, buckets=buckets, window=(1 + before) * chunk, whole=chunk, unscaled=True, key_eps=1e-6
    )


@dataclass(frozen=True, kw_only=True)
class ReformerPreset(Preset):
    """A decoder with one layer per mechanism; its head reads both streams concatenated.

    Args:
        mechanisms: the attention of each layer.
        head_size: the width of a head.
        grid: the shape of the axial positions, whose product is the largest number of tokens.
    """

    mechanisms: tuple[MechanismConfig, ...]
    width: int
    heads: int
    head_size: int
    inner_width: int
    vocabulary: int
    grid: tuple[int, int]

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            max_position_embeddings=self.grid[0] * self.grid[1],
            embedding=EmbeddingConfig(tied=False),
            decoder=StackConfig(
                num_hidden_layers=len(self.mechanisms),
                attention=AttentionConfig(
                    num_attention_heads=self.heads,
                    head_size=self.head_size,
                    bias=False,
                    mechanism=AlternateConfig(mechanisms=self.mechanisms),
                ),
                feedforward=DenseConfig(
                    intermediate_size=self.inner_width, activation="relu", inner_dropout=0.05
                ),
                position=AxialConfig(grid=self.grid),
                block=ReversibleConfig(join="concat"),
                norm=LayerNormConfig(eps=1e-12),
                dropout=0.05,
                final_dropout=0.05,
            ),
            initializer_range=0.02,
        )


NEAR, FAR = local(128, dropout=0.2), hashed(256, rounds=4, buckets=512)
"""The two kinds of layers of the model for enwik8."""

register_presets(
    # google/reformer-crime-and-punishment, which has 64 times 128 buckets
    ReformerPreset(
        "reformer-small",
        "Reformer language model for texts of 2^19 tokens: 6 layers of 256 (Kitaev et al. 2020).",
        mechanisms=(local(64), hashed(64)) * 3,
        width=256,
        heads=2,
        head_size=64,
        inner_width=512,
        vocabulary=320,
        grid=(512, 1024),
    ),
    # google/reformer-enwik8, 149M parameters
    ReformerPreset(
        "reformer-enwik8",
        "Reformer language model of enwik8's bytes: 12 layers of 1024 (Kitaev et al. 2020, section 5).",
        mechanisms=(NEAR, NEAR, FAR, NEAR) * 3,
        width=1024,
        heads=8,
        head_size=128,
        inner_width=4096,
        vocabulary=258,
        grid=(128, 512),
    ),
)
