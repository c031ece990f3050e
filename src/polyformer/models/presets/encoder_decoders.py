"""Encoder-decoders: the Transformer of 2017, BART, M2M-100, T5; and BertSum, with and without a decoder.

BART has GELU, learned positions and a normalized embedding sum. M2M-100 is one model for 100 languages, whose
first output token selects the language: pre-norm, ReLU, scaled tokens and tensor2tensor's sinusoids from
position 2, with layer dropout in training. T5 states every task as text: pre-norm with RMS norms, no biases,
bucketed distances, unscaled scores, dropout also inside the feed-forward and after the final norm. Its fresh
weights are normal with a deviation of 0.02, which keeps unscaled scores small; T5 derives the deviation of
each matrix from its width.
"""

import dataclasses
from dataclasses import dataclass

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import LearnedConfig, SinusoidalConfig, T5BiasConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import SizedPreset, model_config, register_presets, size_options
from polyformer.nn.block import BlockConfig, PostNormConfig, PreNormConfig
from polyformer.nn.feedforward import DenseConfig, FeedForwardConfig, GatedConfig
from polyformer.nn.heads import LanguageModelConfig, TagConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderPreset(SizedPreset):
    """Equal stacks with sinusoids and one token table for inputs of both stacks and the output.

    Args:
        block: the wiring of a layer.
        positions: the largest number of tokens of each text.
    """

    inner_width: int
    dropout: float
    vocabulary: int
    block: BlockConfig = PostNormConfig()
    positions: int = 512

    def config(self) -> ModelConfig:
        stack = StackConfig(
            num_hidden_layers=self.layers,
            attention=AttentionConfig(num_attention_heads=self.heads),
            feedforward=DenseConfig(intermediate_size=self.inner_width),
            dropout=self.dropout,
            block=self.block,
        )
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            max_position_embeddings=self.positions,
            embedding=EmbeddingConfig(scaled=True),
            encoder=stack,
            decoder=stack,
            head=LanguageModelConfig(label_smoothing=0.1),
            special=SpecialTokens(pad=0, bos=1, eos=2),
        )


register_presets(
    EncoderDecoderPreset(
        "transformer-base",
        "The Transformer of 2017, base: 6 + 6 layers of 512 (Vaswani et al. 2017, table 3: 65M parameters).",
        layers=6,
        width=512,
        heads=8,
        inner_width=2048,
        dropout=0.1,
        vocabulary=37000,
    ),
    EncoderDecoderPreset(
        "transformer-big",
        "The Transformer of 2017, big: 6 + 6 layers of 1024 (Vaswani et al. 2017, table 3: 213M parameters).",
        layers=6,
        width=1024,
        heads=16,
        inner_width=4096,
        dropout=0.3,
        vocabulary=37000,
    ),
    EncoderDecoderPreset(
        "transformer-small",
        "Encoder-decoder for a CPU: 3 + 3 layers of 256, pre-norm, which trains without warm-up.",
        layers=3,
        width=256,
        heads=4,
        inner_width=1024,
        dropout=0.1,
        vocabulary=8000,
        block=PreNormConfig(),
    ),
    EncoderDecoderPreset(
        "transformer-tiny",
        "Encoder-decoder for tests: one layer of each.",
        layers=1,
        width=32,
        heads=4,
        inner_width=64,
        dropout=0.1,
        vocabulary=300,
        block=PostNormConfig(),
        positions=128,
    ),
)


@dataclass(frozen=True, kw_only=True)
class BartPreset(SizedPreset):
    """Equal post-norm stacks; the position table has two unused rows before the first position."""

    def config(self) -> ModelConfig:
        stack = StackConfig(
            num_hidden_layers=self.layers,
            attention=AttentionConfig(num_attention_heads=self.heads, mechanism=SoftmaxConfig(dropout=0.1)),
            feedforward=DenseConfig(intermediate_size=4 * self.width, activation="gelu", inner_dropout=0.1),
            position=LearnedConfig(offset=2),
        )
        return ModelConfig(
            vocab_size=50265,
            hidden_size=self.width,
            max_position_embeddings=1024,
            embedding=EmbeddingConfig(scaled=False, normed=True),
            encoder=stack,
            decoder=stack,
            head=LanguageModelConfig(bias=True, frozen_bias=True),
            special=SpecialTokens(pad=1, bos=2, eos=2),
            initializer_range=0.02,
        )


register_presets(
    # facebook/bart-base
    BartPreset(
        "bart-base",
        "BART encoder-decoder: 6 + 6 layers of 768, 139M parameters (Lewis et al. 2020, section 4).",
        layers=6,
        width=768,
        heads=12,
    ),
    BartPreset(
        "bart-large",
        "BART encoder-decoder: 12 + 12 layers of 1024, 406M parameters (Lewis et al. 2020, section 5).",
        layers=12,
        width=1024,
        heads=16,
    ),
)


@dataclass(frozen=True, kw_only=True)
class M2M100Preset(SizedPreset):
    """Equal stacks with 16 heads, and 128112 tokens including one for each language."""

    heads: int = 16
    inner_width: int

    def config(self) -> ModelConfig:
        stack = StackConfig(
            num_hidden_layers=self.layers,
            attention=AttentionConfig(num_attention_heads=self.heads, mechanism=SoftmaxConfig(dropout=0.1)),
            feedforward=DenseConfig(intermediate_size=self.inner_width),
            position=SinusoidalConfig(layout="halves", inclusive=True, offset=2),
            block=PreNormConfig(finite=True),
            layerdrop=0.05,
        )
        return ModelConfig(
            vocab_size=128112,
            hidden_size=self.width,
            max_position_embeddings=1024,
            embedding=EmbeddingConfig(scaled=True),
            encoder=stack,
            decoder=stack,
            head=LanguageModelConfig(),
            special=SpecialTokens(pad=1, bos=2, eos=2),
            initializer_range=0.02,
        )


register_presets(
    M2M100Preset(
        "m2m100-418m",
        "M2M-100, 100 languages: 12 + 12 layers of 1024, 484M parameters, called 418M (Fan et al. 2021).",
        layers=12,
        width=1024,
        inner_width=4096,
    ),
    M2M100Preset(
        "m2m100-1.2b",
        "M2M-100, 100 languages: 24 + 24 layers of 1024, 1239M parameters (Fan et al. 2021).",
        layers=24,
        width=1024,
        inner_width=8192,
    ),
    M2M100Preset(
        "m2m100-12b",
        "M2M-100, 100 languages: 24 + 24 layers of 4096, 11.8B parameters, called 12B (Fan et al. 2021).",
        layers=24,
        width=4096,
        inner_width=16384,
    ),
)


@dataclass(frozen=True, kw_only=True)
class T5Preset(SizedPreset):
    """The first version: equal stacks with dropout of 0.1; the output layer, tied, reads scaled states.

    Args:
        inner_width: the width of feed-forward layers.
        head_size: the width of a head.
    """

    inner_width: int
    head_size: int = 64

    tied = True

    def feedforward(self) -> FeedForwardConfig:
        """Return the feed-forward layers of this version: ReLU."""
        return DenseConfig(intermediate_size=self.inner_width, bias=False, inner_dropout=0.1)

    def config(self) -> ModelConfig:
        stack = StackConfig(
            num_hidden_layers=self.layers,
            attention=AttentionConfig(
                num_attention_heads=self.heads,
                head_size=self.head_size,
                bias=False,
                mechanism=SoftmaxConfig(scale=1.0, dropout=0.1),
            ),
            feedforward=self.feedforward(),
            position=T5BiasConfig(),
            block=PreNormConfig(finite=True),
            norm=RMSNormConfig(eps=1e-6),
            final_dropout=0.1,
        )
        return ModelConfig(
            vocab_size=32128,
            hidden_size=self.width,
            embedding=EmbeddingConfig(tied=self.tied),
            encoder=stack,
            decoder=stack,
            head=LanguageModelConfig(scaled=self.tied),
            special=SpecialTokens(pad=0, bos=0, eos=1),
            initializer_range=0.02,
        )


register_presets(
    # The paper says about 60 million parameters.
    T5Preset(
        "t5-small",
        "T5 encoder-decoder: 6 + 6 layers of 512, 60.5M parameters (Raffel et al. 2020, section 3.7).",
        layers=6,
        width=512,
        heads=8,
        inner_width=2048,
    ),
    # The paper says about 220 million parameters.
    T5Preset(
        "t5-base",
        "T5 encoder-decoder: 12 + 12 layers of 768, 223M parameters (Raffel et al. 2020, section 3.1.1).",
        layers=12,
        width=768,
        heads=12,
        inner_width=3072,
    ),
    # The paper says 770 million parameters.
    T5Preset(
        "t5-large",
        "T5 encoder-decoder: 24 + 24 layers of 1024, 738M parameters (Raffel et al. 2020, section 3.7).",
        layers=24,
        width=1024,
        heads=16,
        inner_width=4096,
    ),
    T5Preset(
        "t5-3b",
        "T5 encoder-decoder: 24 + 24 layers of 1024, 2.85B parameters (Raffel et al. 2020, section 3.7).",
        layers=24,
        width=1024,
        heads=32,
        inner_width=16384,
        head_size=128,
    ),
    T5Preset(
        "t5-11b",
        "T5 encoder-decoder: 24 + 24 layers of 1024, 11.3B parameters (Raffel et al. 2020, section 3.7).",
        layers=24,
        width=1024,
        heads=128,
        inner_width=65536,
        head_size=128,
    ),
)


@dataclass(frozen=True, kw_only=True)
class T5v11Preset(T5Preset):
    """Version 1.1 (Xue et al. 2021): gated GELU, and an output layer of its own."""

    tied = False

    def feedforward(self) -> FeedForwardConfig:
        """Return the feed-forward layers of this version: gated GELU."""
        return GatedConfig(intermediate_size=self.inner_width, activation="gelu_tanh", inner_dropout=0.1)


register_presets(
    T5v11Preset(
        "t5-v1_1-small",
        "T5 version 1.1, and Flan-T5: 8 + 8 layers of 512, gated GELU, untied output, 77M parameters.",
        layers=8,
        width=512,
        heads=6,
        inner_width=1024,
    ),
    T5v11Preset(
        "t5-v1_1-base",
        "T5 version 1.1, and Flan-T5: 12 + 12 layers of 768, gated GELU, untied output, 248M parameters.",
        layers=12,
        width=768,
        heads=12,
        inner_width=2048,
    ),
)


@dataclass(frozen=True, kw_only=True)
class BertSumPreset(SizedPreset):
    """BERT with a score for each token; BertSum reads the scores of the first tokens of sentences."""

    vocabulary: int

    def config(self) -> ModelConfig:
        sizes = size_options(self.layers, self.width, self.heads)
        config = model_config("bert-base", {**sizes, "vocab_size": self.vocabulary})
        return dataclasses.replace(config, head=TagConfig(num_labels=2))


register_presets(
    BertSumPreset(
        "bertsum",
        "BertSum extractive summarizer, 12 layers of 768 (Liu 2019, section 2).",
        layers=12,
        width=768,
        heads=12,
        vocabulary=30522,
    ),
    BertSumPreset(
        "bertsum-small",
        "BertSum extractive summarizer, for a CPU: 4 layers of 256 (Liu 2019).",
        layers=4,
        width=256,
        heads=8,
        vocabulary=8000,
    ),
)


@dataclass(frozen=True, kw_only=True)
class BertSumAbsPreset(BertSumPreset):
    """BERT with a decoder that has its own token table, tied to the output layer.

    Deviations: the decoder's embedding sum has a norm and the vector of token type 0 too, because both stacks
    have the same terms. Training has a single optimizer: separate learning rates and warm-ups of the encoder
    and the decoder (equations 6 and 7) are missing.
    """

    decoder_layers: int
    decoder_heads: int
    decoder_inner_width: int

    def config(self) -> ModelConfig:
        config = super().config()
        decoder = StackConfig(
            num_hidden_layers=self.decoder_layers,
            attention=AttentionConfig(num_attention_heads=self.decoder_heads),
            feedforward=DenseConfig(intermediate_size=self.decoder_inner_width, activation="gelu"),
            position=SinusoidalConfig(),
            block=PreNormConfig(),
        )
        return dataclasses.replace(
            config,
            embedding=dataclasses.replace(config.embedding, shared=False),
            decoder=decoder,
            head=LanguageModelConfig(),
            # [PAD], and the first unused tokens of BERT's vocabulary
            special=SpecialTokens(pad=0, bos=1, eos=2),
        )


register_presets(
    BertSumAbsPreset(
        "bertsum-abs",
        "BertSum abstractive summarizer, 12 + 6 layers of 768 (Liu and Lapata 2019, sections 3.2 and 4.2).",
        layers=12,
        width=768,
        heads=12,
        vocabulary=30522,
        decoder_layers=6,
        decoder_heads=8,
        decoder_inner_width=2048,
    ),
    BertSumAbsPreset(
        "bertsum-abs-small",
        "BertSum abstractive summarizer, for a CPU, 4 + 2 layers of 256 (Liu and Lapata 2019, section 3.2).",
        layers=4,
        width=256,
        heads=8,
        vocabulary=8000,
        decoder_layers=2,
        decoder_heads=4,
        decoder_inner_width=512,
    ),
)
