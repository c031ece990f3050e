"""Models with memories, states, stores, and with layers that are repeated or chosen.

Transformer-XL (Dai et al. 2019): the paper's tables give numbers of parameters; widths and lengths are those
of the authors' code (`run_*_base.sh`, `tf/sota/*.sh`). The memory has the length of evaluation, longer than
in training; change it by `memory.length`. The 18-layer model of 88M parameters on enwik8 has no published
widths. Compressive and Memorizing Transformers follow.

`knn-lm` is the language model of the paper, which is Baevski and Auli's (2019), with adaptive embeddings; its
datastore is built from a trained model (`polyformer datastore`). SPALM has the sizes of Transformer-XL and a
plain token table, from which it reads the vectors of neighbours.

The Universal Transformer (Dehghani et al. 2019, section 3.5) repeats one layer per stack:

    h' = h^(t-1) + P^t,   A^t = LayerNorm(h' + Attention(h')),   h^t = LayerNorm(A^t + Transition(A^t))

with P^t of position and step (`step_sinusoid`); the decoder has cross-attention between the two. This is the
Transformer of 2017 with `num_hidden_groups=1` and these positions; `num_hidden_layers` is the number of steps
and does not change the weights. The transition is the dense feed-forward, or the paper's alternative with
`feedforward="separable_convolution"`; `depth="act"` lets every token choose its steps.

The Depth-Adaptive Transformer (Elbayad et al. 2020) and CALM (Schuster et al. 2022) choose the number of
decoder layers for each token. All exits share the output table; Elbayad et al. have a further output layer
for each exit. CALM's three confidence measures are the rules `softmax`, `saturation` and `classifier`
(`depth.rule`). Mamba-2 is a model of states.
"""

from dataclasses import dataclass

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.attention.mechanisms.recurrence.members import SSDConfig
from polyformer.attention.patterns import Full, Window
from polyformer.attention.positions import TransformerXLConfig
from polyformer.attention.positions.added import NoPositionConfig
from polyformer.core.ops.norms import LayerNormConfig, RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import (
    Preset,
    SizedPreset,
    Variant,
    model_config,
    register_presets,
    size_options,
)
from polyformer.nn.block import PostNormConfig, PreNormConfig
from polyformer.nn.feedforward import DenseConfig, NoFeedForwardConfig
from polyformer.nn.heads import AdaptiveSoftmaxConfig, SemiparametricConfig
from polyformer.nn.memory import CompressiveConfig, MemorizingConfig, RecurrentConfig
from polyformer.nn.stack import AdaptiveConfig, AttentionConfig, EmbeddingConfig, StackConfig


@dataclass(frozen=True)
class Vocabulary:
    """The number of tokens of a corpus and the cut-offs of their clusters."""

    tokens: int
    cutoffs: tuple[int, ...] = ()


WIKITEXT_103 = Vocabulary(267735, cutoffs=(20000, 40000, 200000))
ENWIK8 = Vocabulary(204)
ONE_BILLION_WORDS = Vocabulary(793471, cutoffs=(60000, 100000, 640000))
"""The vocabularies of the corpora in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class TransformerXLPreset(SizedPreset):
    """A post-norm decoder with recurrence over segments.

    Args:
        memory: the number of tokens that a token attends to, including itself.
        clamp: the distance at which larger distances are clamped, None for none.
        div_val: the quotient of the widths of successive clusters of tokens.
        untied: whether each layer has its own global queries.
        tie_projs: the clusters whose output projection is the one of the input; None for all.
    """

    head_size: int
    inner_width: int
    vocabulary: Vocabulary
    memory: int
    clamp: int | None
    div_val: int
    untied: bool
    tie_projs: tuple[bool, ...] | None = None

    def config(self) -> ModelConfig:
        clusters = AdaptiveConfig(cutoffs=self.vocabulary.cutoffs, div_val=self.div_val, d_embed=self.width)
        return ModelConfig(
            vocab_size=self.vocabulary.tokens,
            hidden_size=self.width,
            embedding=EmbeddingConfig(scaled=True, adaptive=clusters),
            decoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(
                    num_attention_heads=self.heads,
                    head_size=self.head_size,
                    bias=False,
                    mechanism=SoftmaxConfig(pattern=Window(self.memory - 1, 0)),
                ),
                feedforward=DenseConfig(intermediate_size=self.inner_width, inner_dropout=0.1),
                position=TransformerXLConfig(
                    shared_biases=not self.untied, clamp_distance=self.clamp, waves_dropout=0.1
                ),
                memory=RecurrentConfig(length=self.memory),
                block=PostNormConfig(),
                norm=LayerNormConfig(eps=1e-5),
                dropout=0.1,
                final_dropout=0.1,
            ),
            head=AdaptiveSoftmaxConfig(tie_projs=self.tie_projs),
            special=SpecialTokens(eos=0),
            initializer_range=0.02,
        )


register_presets(
    TransformerXLPreset(
        "transformer-xl-base",
        "Transformer-XL for WikiText-103, standard: 16 layers of 410, 151M parameters "
        "(Dai et al. 2019, table 1).",
        layers=16,
        width=410,
        heads=10,
        head_size=41,
        inner_width=2100,
        vocabulary=WIKITEXT_103,
        memory=640,
        clamp=400,
        div_val=1,
        untied=False,
    ),
    # The table says 257M; the authors' file, `transfo-xl-wt103` on the hub, has 285M.
    TransformerXLPreset(
        "transformer-xl-large",
        "Transformer-XL for WikiText-103, large: 18 layers of 1024, 285M parameters "
        "(Dai et al. 2019, table 1).",
        layers=18,
        width=1024,
        heads=16,
        head_size=64,
        inner_width=4096,
        vocabulary=WIKITEXT_103,
        memory=1600,
        clamp=1000,
        div_val=4,
        untied=True,
    ),
    TransformerXLPreset(
        "transformer-xl-enwik8-12",
        "Transformer-XL for enwik8's bytes: 12 layers of 512, 41M parameters (Dai et al. 2019, table 2).",
        layers=12,
        width=512,
        heads=8,
        head_size=64,
        inner_width=2048,
        vocabulary=ENWIK8,
        memory=2100,
        clamp=820,
        div_val=1,
        untied=False,
    ),
    TransformerXLPreset(
        "transformer-xl-enwik8-24",
        "Transformer-XL for enwik8's bytes: 24 layers of 1024, 277M parameters (Dai et al. 2019, table 2).",
        layers=24,
        width=1024,
        heads=8,
        head_size=128,
        inner_width=3072,
        vocabulary=ENWIK8,
        memory=3800,
        clamp=1000,
        div_val=1,
        untied=False,
    ),
    TransformerXLPreset(
        "transformer-xl-1b-large",
        "Transformer-XL for One Billion Word, large: 24 layers of 1280 (Dai et al. 2019, table 4).",
        layers=24,
        width=1280,
        heads=16,
        head_size=80,
        inner_width=8192,
        vocabulary=ONE_BILLION_WORDS,
        memory=128,
        clamp=None,
        div_val=4,
        untied=True,
        tie_projs=(False,) * 4,
    ),
)

WORDS = 267744
"""WikiText-103's words, padded to a multiple of 8."""

SEGMENTS = {"position": "transformer_xl", "memory": "recurrent(length=128)"}
"""Overrides for the small models: Transformer-XL's memory and positions."""

register_presets(
    Variant(
        "compressive-transformer",
        "Compressive Transformer of WikiText-103: 18 layers of 1024, 500 tokens, 1500 vectors "
        "(Rae et al. 2020, section 5).",
        base="transformer-xl-large",
        changes={
            "attention": Full(),
            "memory": CompressiveConfig(length=500, compressed_length=1500, rate=4),
        },
    ),
    Variant(
        "compressive-transformer-enwik8",
        "Compressive Transformer of enwik8's bytes: 24 layers of 1024, 768 tokens, 1152 vectors "
        "(Rae et al. 2020, section 5).",
        base="transformer-xl-enwik8-24",
        changes={
            "attention": Full(),
            "memory": CompressiveConfig(length=768, compressed_length=1152, rate=3),
        },
    ),
    Variant(
        "compressive-transformer-small",
        "Compressive Transformer for a CPU: 4 layers of 256, 128 tokens and 128 vectors (Rae et al. 2020).",
        base="decoder-small",
        changes={**SEGMENTS, "memory": CompressiveConfig(length=128, compressed_length=128, rate=4)},
    ),
    # "Approximately 200M": 184M with the output tied to the token table, 217M without.
    Variant(
        "memorizing-transformer",
        "Memorizing Transformer: 12 layers of 1024, a store of 65,536 tokens, 184M parameters "
        "(Wu et al. 2022, section 4.2).",
        base="decoder-small",
        changes={
            **size_options(12, 1024, 8),
            "vocab_size": 32000,
            "position": "t5",
            "activation": "relu",
            "memory": MemorizingConfig(length=512, store=65536, neighbours=32),
        },
    ),
    Variant(
        "memorizing-transformer-small",
        "Memorizing Transformer for a CPU: 4 layers of 256, a store of 8,192 tokens (Wu et al. 2022).",
        base="decoder-small",
        changes={**SEGMENTS, "memory": MemorizingConfig(length=128, store=8192)},
    ),
    Variant(
        "spalm",
        "SPALM of WikiText-103 in Transformer-XL's sizes: 16 layers of 410 "
        "(Yogatama et al. 2021, section 4.1).",
        base="transformer-xl-base",
        changes={"embedding.adaptive": None, "attention": Full(), "head": SemiparametricConfig()},
    ),
    Variant(
        "spalm-small",
        "SPALM for a CPU: 4 layers of 256 (Yogatama et al. 2021).",
        base="decoder-small",
        changes={**SEGMENTS, "head": SemiparametricConfig()},
    ),
    Variant(
        "knn-lm",
        "Language model of kNN-LM for WikiText-103: 16 layers of 1024, 247M parameters "
        "(Khandelwal et al. 2020, section 4).",
        base="decoder-small",
        changes={
            **size_options(16, 1024, 8),
            "vocab_size": WORDS,
            "embedding.adaptive": AdaptiveConfig(cutoffs=(20000, 60000), d_embed=1024),
            "head": AdaptiveSoftmaxConfig(tie_projs=(True,) * 3),
            "position": "sinusoidal",
            "activation": "relu",
            "embedding.scaled": True,
            "final_norm": False,
        },
    ),
    Variant(
        "knn-lm-small",
        "Language model of kNN-LM for a CPU: 4 layers of 256 (Khandelwal et al. 2020).",
        base="decoder-small",
        changes={"position": "sinusoidal", "embedding.scaled": True},
    ),
)


@dataclass(frozen=True, kw_only=True)
class UniversalPreset(Preset):
    """The preset `base` with one shared layer per stack, applied in `steps` steps."""

    base: str
    steps: int

    def config(self) -> ModelConfig:
        options = {"num_hidden_groups": 1, "position": "step_sinusoid", "num_hidden_layers": self.steps}
        return model_config(self.base, options)


register_presets(
    # tensor2tensor's model of this name, which has as many parameters as the base Transformer
    UniversalPreset(
        "universal-transformer-base",
        "Universal Transformer: one layer a side, applied in 6 steps (Dehghani et al. 2019, section 3.5).",
        base="transformer-big",
        steps=6,
    ),
    UniversalPreset(
        "universal-transformer-tiny",
        "Universal Transformer for tests: one layer a side, applied in three steps.",
        base="transformer-tiny",
        steps=3,
    ),
)

MULTINOMIAL = {"decoder.depth": "exits(rule=multinomial, training=aligned)"}
"""The exits of Depth-Adaptive Transformers: a distribution over layers for each token."""

SOFTMAX = {"decoder.depth": "exits(rule=softmax)"}
"""CALM's exits by the difference of the two largest probabilities."""

register_presets(
    Variant(
        "depth-adaptive",
        "Depth-Adaptive Transformer for IWSLT German to English: 6 + 6 layers of 512 "
        "(Elbayad et al. 2020, section 5.1).",
        base="transformer-base",
        changes={**MULTINOMIAL, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 10000},
    ),
    Variant(
        "depth-adaptive-big",
        "Depth-Adaptive Transformer for WMT English to French: 6 + 6 layers of 1024 "
        "(Elbayad et al. 2020, section 5.1).",
        base="transformer-big",
        changes={**MULTINOMIAL, "vocab_size": 44000},
    ),
    Variant(
        "depth-adaptive-small",
        "Depth-Adaptive Transformer for a CPU: 3 + 6 layers of 256 (Elbayad et al. 2020).",
        base="transformer-small",
        changes={**MULTINOMIAL, "decoder.num_hidden_layers": 6},
    ),
    Variant(
        "calm",
        "CALM, T5 1.1 with exits: 8 + 8 layers of 512 (Schuster et al. 2022, section 5).",
        base="t5-v1_1-small",
        changes=SOFTMAX,
    ),
    Variant(
        "calm-small",
        "CALM for a CPU: 2 + 6 layers of 128 (Schuster et al. 2022).",
        base="t5-v1_1-small",
        changes={
            **SOFTMAX,
            **size_options(2, 128, 4),
            "decoder.num_hidden_layers": 6,
            "head_size": 32,
            "intermediate_size": 256,
            "vocab_size": 8000,
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class Mamba2Preset(SizedPreset):
    """State space layers without feed-forwards and without positions (Dao and Gu 2024).

    Values are twice as wide as the model, in heads of 64, and keys of 128 per group.

    Args:
        key_heads: the number of groups of heads that share keys.
        tied: whether the output layer shares the token vectors.
    """

    key_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> ModelConfig:
        sizes = RecurrentHeadsConfig(
            key_heads=self.key_heads, value_heads=self.heads, key_size=128, value_size=64
        )
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            max_position_embeddings=8192,
            embedding=EmbeddingConfig(tied=self.tied),
            decoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(
                    num_attention_heads=self.heads,
                    head_size=64,
                    bias=False,
                    mechanism=SSDConfig(convolution_bias=True, heads=sizes),
                ),
                feedforward=NoFeedForwardConfig(),
                position=NoPositionConfig(),
                block=PreNormConfig(),
                norm=RMSNormConfig(eps=1e-5),
                dropout=0.0,
            ),
            special=SpecialTokens(pad=0, bos=0, eos=0) if self.tied else SpecialTokens(pad=1, bos=0, eos=2),
            initializer_range=0.1,
        )


register_presets(
    Mamba2Preset(
        "mamba2-130m",
        "Mamba-2 decoder: 24 layers of 768, 129M parameters (Dao and Gu 2024).",
        layers=24,
        width=768,
        heads=24,
        key_heads=1,
        vocabulary=50288,
        tied=True,
    ),
    Mamba2Preset(
        "mamba-codestral-7b",
        "Mamba-2 decoder: 64 layers of 4096, 7.3B parameters (Dao and Gu 2024).",
        layers=64,
        width=4096,
        heads=128,
        key_heads=8,
        vocabulary=32768,
        tied=False,
    ),
)
