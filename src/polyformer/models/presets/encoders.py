"""Encoders: BERT and the models of its layout, ModernBERT, and small text classifiers.

RoBERTa and XLM-RoBERTa have one token type, and positions that start after the padding id; XLM has a vector
for each language instead of token types; ALBERT has narrow token vectors and one layer's weights for all
layers; ELECTRA's discriminators detect replaced tokens; DistilBERT has half the layers. ModernBERT is
pre-norm without biases, with rotary positions, GeGLU and two windowed layers after each layer of full
attention.
"""

import dataclasses
from dataclasses import dataclass

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.patterns.implied import Full
from polyformer.attention.positions import LearnedConfig, RopeConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import (
    Preset,
    SizedPreset,
    model_config,
    register_presets,
    size_options,
)
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig, GatedConfig
from polyformer.nn.heads import ClassifyConfig, DetectConfig, HeadConfig, LanguageModelConfig, MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


@dataclass(frozen=True, kw_only=True)
class BertPreset(SizedPreset):
    """BERT's layout: post-norm, learned positions, a norm after the embedding sum, a masked head."""

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=30522,
            hidden_size=self.width,
            embedding=EmbeddingConfig(normed=True, type_vocab_size=2),
            encoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(num_attention_heads=self.heads),
                feedforward=DenseConfig(intermediate_size=4 * self.width, activation="gelu"),
                position=LearnedConfig(),
                norm=LayerNormConfig(eps=1e-12),
            ),
            head=MaskedConfig(),
            initializer_range=0.02,
        )


register_presets(
    BertPreset(
        "bert-base",
        "BERT encoder for masked tokens: 12 layers of 768, 110M parameters (Devlin et al. 2019, section 3).",
        layers=12,
        width=768,
        heads=12,
    ),
    BertPreset(
        "bert-large",
        "BERT encoder for masked tokens: 24 layers of 1024 (Devlin et al. 2019, section 3: 340M parameters).",
        layers=24,
        width=1024,
        heads=16,
    ),
)


@dataclass(frozen=True, kw_only=True)
class TextClassifierPreset(SizedPreset):
    """A pre-norm encoder with learned positions and a classification head.

    Args:
        positions: the largest number of tokens.
    """

    vocabulary: int
    positions: int

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            max_position_embeddings=self.positions,
            encoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(num_attention_heads=self.heads),
                feedforward=DenseConfig(intermediate_size=4 * self.width, activation="gelu"),
                position=LearnedConfig(),
                block=PreNormConfig(),
            ),
            head=ClassifyConfig(pooling="mean", hidden=False),
            initializer_range=0.02,
        )


register_presets(
    TextClassifierPreset(
        "encoder-small",
        "Text classifier for a CPU: an encoder with 2 layers of 128.",
        layers=2,
        width=128,
        heads=4,
        vocabulary=8000,
        positions=512,
    ),
    TextClassifierPreset(
        "encoder-tiny",
        "Text classifier for tests: an encoder with one layer of 32.",
        layers=1,
        width=32,
        heads=2,
        vocabulary=300,
        positions=64,
    ),
)


@dataclass(frozen=True, kw_only=True)
class RobertaPreset(SizedPreset):
    """RoBERTa, for texts of 512 tokens; the first two rows of the position table are unused."""

    vocabulary: int

    def config(self) -> ModelConfig:
        options = {
            "vocab_size": self.vocabulary,
            "type_vocab_size": 1,
            "offset": 2,
            "eps": 1e-5,
            "pad": 1,
            "bos": 0,
            "eos": 2,
        }
        return model_config("bert-base", {**size_options(self.layers, self.width, self.heads), **options})


register_presets(
    RobertaPreset(
        "roberta-base",
        "RoBERTa encoder for masked tokens: 12 layers of 768, 125M parameters (Liu et al. 2019, section 3).",
        layers=12,
        width=768,
        heads=12,
        vocabulary=50265,
    ),
    RobertaPreset(
        "roberta-large",
        "RoBERTa encoder for masked tokens: 24 layers of 1024, 355M parameters (Liu et al. 2019, section 5).",
        layers=24,
        width=1024,
        heads=16,
        vocabulary=50265,
    ),
    # The paper says 270M parameters.
    RobertaPreset(
        "xlm-roberta-base",
        "XLM-RoBERTa, 100 languages: 12 layers of 768, 278M parameters (Conneau et al. 2020, section 3).",
        layers=12,
        width=768,
        heads=12,
        vocabulary=250002,
    ),
    # The paper says 550M parameters.
    RobertaPreset(
        "xlm-roberta-large",
        "XLM-RoBERTa, 100 languages: 24 layers of 1024, 560M parameters (Conneau et al. 2020, section 3).",
        layers=24,
        width=1024,
        heads=16,
        vocabulary=250002,
    ),
)


@dataclass(frozen=True, kw_only=True)
class XlmPreset(SizedPreset):
    """XLM, section 5.1: GELU, learned positions, dropout of 0.1.

    Args:
        languages: the number of languages with a vector, 0 for a model of one language.
        causal: whether the model is a decoder.
    """

    vocabulary: int
    languages: int = 0
    causal: bool = False

    def config(self) -> ModelConfig:
        options = {"vocab_size": self.vocabulary, "type_vocab_size": 0, "pad": 2, "bos": 0, "eos": 1}
        sizes = size_options(self.layers, self.width, self.heads)
        config = model_config("bert-base", {**sizes, **options})
        return dataclasses.replace(
            config,
            embedding=dataclasses.replace(config.embedding, num_languages=self.languages),
            encoder=None if self.causal else config.encoder,
            decoder=config.encoder if self.causal else None,
            head=LanguageModelConfig(bias=True),
        )


register_presets(
    XlmPreset(
        "xlm-mlm-en-2048",
        "XLM encoder of English: 12 layers of 2048, 667M parameters (Conneau and Lample 2019).",
        layers=12,
        width=2048,
        heads=16,
        vocabulary=30145,
    ),
    XlmPreset(
        "xlm-clm-ende-1024",
        "XLM language model, English and German: 6 layers of 1024 (Conneau and Lample 2019, section 5.1).",
        layers=6,
        width=1024,
        heads=8,
        vocabulary=64699,
        languages=2,
        causal=True,
    ),
    XlmPreset(
        "xlm-mlm-tlm-xnli15-1024",
        "XLM encoder of 15 languages: 12 layers of 1024, 249M parameters (Conneau and Lample 2019).",
        layers=12,
        width=1024,
        heads=8,
        vocabulary=95000,
        languages=15,
    ),
)


@dataclass(frozen=True, kw_only=True)
class AlbertPreset(SizedPreset):
    """ALBERT's version 2: 30000 tokens with vectors of 128, and no dropout."""

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=30000,
            hidden_size=self.width,
            embedding=EmbeddingConfig(normed=True, type_vocab_size=2, size=128),
            encoder=StackConfig(
                num_hidden_layers=self.layers,
                num_hidden_groups=1,
                attention=AttentionConfig(num_attention_heads=self.heads),
                feedforward=DenseConfig(intermediate_size=4 * self.width, activation="gelu_tanh"),
                position=LearnedConfig(),
                norm=LayerNormConfig(eps=1e-12),
                dropout=0.0,
            ),
            head=MaskedConfig(activation="gelu_tanh"),
            special=SpecialTokens(pad=0, bos=2, eos=3),
            initializer_range=0.02,
        )


register_presets(
    AlbertPreset(
        "albert-base",
        "ALBERT encoder with shared layers: 12 layers of 768 (Lan et al. 2020, table 1: 12M parameters).",
        layers=12,
        width=768,
        heads=12,
    ),
    AlbertPreset(
        "albert-large",
        "ALBERT encoder with shared layers: 24 layers of 1024 (Lan et al. 2020, table 1: 18M parameters).",
        layers=24,
        width=1024,
        heads=16,
    ),
    # The released weights are 223M.
    AlbertPreset(
        "albert-xxlarge",
        "ALBERT encoder with shared layers: 12 layers of 4096 (Lan et al. 2020, table 1: 235M parameters).",
        layers=12,
        width=4096,
        heads=64,
    ),
)


@dataclass(frozen=True, kw_only=True)
class ElectraPreset(SizedPreset):
    """ELECTRA: BERT's layout, the small models with narrow token vectors.

    Args:
        token_width: the size of token vectors.
        head: `DetectConfig` for a discriminator.
    """

    token_width: int
    head: HeadConfig = DetectConfig()

    def config(self) -> ModelConfig:
        config = model_config("bert-base", {**size_options(self.layers, self.width, self.heads), "pad": 0})
        size = None if self.token_width == self.width else self.token_width
        embedding = dataclasses.replace(config.embedding, size=size)
        return dataclasses.replace(config, embedding=embedding, head=self.head)


register_presets(
    ElectraPreset(
        "electra-small",
        "ELECTRA discriminator: 12 layers of 256, 14M parameters (Clark et al. 2020, section 3.3).",
        layers=12,
        width=256,
        heads=4,
        token_width=128,
    ),
    ElectraPreset(
        "electra-base",
        "ELECTRA discriminator: 12 layers of 768, 110M parameters (Clark et al. 2020, table 3).",
        layers=12,
        width=768,
        heads=12,
        token_width=768,
    ),
    ElectraPreset(
        "electra-large",
        "ELECTRA discriminator: 24 layers of 1024, 335M parameters (Clark et al. 2020, table 2).",
        layers=24,
        width=1024,
        heads=16,
        token_width=1024,
    ),
    # The generator that `electra-base` is trained with, a third of its width.
    ElectraPreset(
        "electra-base-generator",
        "ELECTRA generator: 12 layers of 256 above token vectors of 768 (Clark et al. 2020, table 6).",
        layers=12,
        width=256,
        heads=4,
        token_width=768,
        head=MaskedConfig(),
    ),
)


@dataclass(frozen=True, kw_only=True)
class DistilBertPreset(Preset):
    """BERT-base with this number of layers, without token types."""

    layers: int

    def config(self) -> ModelConfig:
        return model_config("bert-base", {"num_hidden_layers": self.layers, "type_vocab_size": 0, "pad": 0})


register_presets(
    # The table says 66M, without the masked head's own layer.
    DistilBertPreset(
        "distilbert-base",
        "DistilBERT, BERT with half the layers: 6 layers of 768, 67M parameters (Sanh et al. 2019, table 3).",
        layers=6,
    ),
)


GLOBAL, LOCAL = 160_000.0, 10_000.0
"""The RoPE bases of ModernBERT's layers with full attention and of its windowed layers."""


@dataclass(frozen=True, kw_only=True)
class ModernBertPreset(SizedPreset):
    """ModernBERT: groups of a layer with full attention and two with 64 tokens on either side.

    Rotary positions with a different base for each kind of layer, GeGLU, 8192 tokens.
    """

    inner_width: int

    def config(self) -> ModelConfig:
        near, eps = Window(64, 64), 1e-5
        return ModelConfig(
            vocab_size=50368,
            hidden_size=self.width,
            max_position_embeddings=8192,
            embedding=EmbeddingConfig(normed=True, embedding_dropout=0.0),
            encoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(
                    num_attention_heads=self.heads,
                    bias=False,
                    mechanism=SoftmaxConfig(pattern=PerLayer((Full(), near, near))),
                ),
                feedforward=GatedConfig(intermediate_size=self.inner_width, activation="gelu"),
                position=RopeConfig(bases=(GLOBAL, LOCAL, LOCAL)),
                block=PreNormConfig(first_norm=False),
                norm=LayerNormConfig(eps=eps, bias=False),
                dropout=0.0,
            ),
            head=MaskedConfig(eps=eps, dense_bias=False, norm_bias=False),
            special=SpecialTokens(pad=50283, bos=50281, eos=50282),
            initializer_range=0.02,
        )


register_presets(
    ModernBertPreset(
        "modernbert-base",
        "ModernBERT encoder: 22 layers of 768, two in three of them local (Warner et al. 2024, table 4).",
        layers=22,
        width=768,
        heads=12,
        inner_width=1152,
    ),
    ModernBertPreset(
        "modernbert-large",
        "ModernBERT encoder: 28 layers of 1024, two in three of them local (Warner et al. 2024, table 4).",
        layers=28,
        width=1024,
        heads=16,
        inner_width=2624,
    ),
)
