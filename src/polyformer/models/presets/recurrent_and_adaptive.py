"""Models that repeat or choose layers, and models of states: Universal and Depth-Adaptive Transformers, CALM,
Mamba-2.

The Universal Transformer (Dehghani et al. 2019, section 3.5) repeats one layer per stack:

    h' = h^(t-1) + P^t,   A^t = LayerNorm(h' + Attention(h')),   h^t = LayerNorm(A^t + Transition(A^t))

with P^t of position and step (`step_sinusoid`); the decoder has cross-attention between the two. This is the
Transformer of 2017 with `num_hidden_groups=1` and these positions; `num_hidden_layers` is the number of steps
and does not change the weights. The transition is the dense feed-forward, or the paper's alternative with
`feedforward="separable_convolution"`; `depth="act"` lets every token choose its steps.

The Depth-Adaptive Transformer (Elbayad et al. 2020) and CALM (Schuster et al. 2022) choose the number of
decoder layers for each token. All exits share the output table; Elbayad et al. have a further output layer
for each exit. CALM's three confidence measures are the rules `softmax`, `saturation` and `classifier`
(`depth.rule`).
"""

from dataclasses import dataclass

from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.attention.mechanisms.recurrence.members import SSDConfig
from polyformer.attention.positions.added import NoPositionConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import (
    Preset,
    SizedPreset,
    Variant,
    model_config,
    register_presets,
    size_options,
)
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import NoFeedForwardConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


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
