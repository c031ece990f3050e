"""Systems with fewer keys or attention in linear time: Linformer, T-DMCA, RFA and Performer.

Linformer projects keys and values along the length; T-DMCA's memory-compressed layers alternate with local
ones; random feature attention (RFA) and Performer replace the softmax by features. The paper on RFA does not
give the cut-offs of its vocabulary; Transformer-XL's lead to about as many parameters.
"""

from dataclasses import dataclass

from polyformer.attention.mechanisms import (
    AlternateConfig,
    LinformerConfig,
    MemoryCompressedConfig,
    PerformerConfig,
    RFAConfig,
    SoftmaxConfig,
)
from polyformer.attention.patterns import BlockWindow
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import SizedPreset, Variant, register_presets, size_options
from polyformer.nn.feedforward import AlternateFeedForwardConfig, DenseConfig, ExpertsConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

register_presets(
    Variant(
        "linformer",
        "Linformer encoder for 512 tokens, k = 256, shared by all layers: 12 layers of 768 "
        "(Wang et al. 2020, table 2).",
        base="roberta-base",
        changes={"attention": LinformerConfig(max_length=512, k=256, sharing="layer")},
    ),
    Variant(
        "linformer-small",
        "Linformer encoder for a CPU, k = 64: 4 layers of 256 (Wang et al. 2020).",
        base="bert-base",
        changes={
            **size_options(4, 256, 8),
            "vocab_size": 8000,
            "attention": LinformerConfig(max_length=512, k=64, sharing="layer"),
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class TDmcaPreset(SizedPreset):
    """T-DMCA (Liu et al. 2018): layers L M L M L, post-norm with sinusoids, as in Vaswani et al. 2017.

    L attends within blocks of `block` tokens, M has compressed keys and `experts` experts (the paper has 128
    or 256).
    """

    inner_width: int
    block: int
    experts: int
    vocabulary: int

    def config(self) -> ModelConfig:
        dense = DenseConfig(intermediate_size=self.inner_width)
        local = SoftmaxConfig(pattern=BlockWindow(self.block, 0, 0))
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            # Later defaults would change the results of earlier runs.
            embedding=EmbeddingConfig(scaled=False),
            decoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(
                    num_attention_heads=self.heads,
                    mechanism=AlternateConfig(mechanisms=(local, MemoryCompressedConfig())),
                ),
                feedforward=AlternateFeedForwardConfig(
                    feedforwards=(dense, ExpertsConfig(expert=dense, experts=self.experts))
                ),
            ),
            initializer_range=None,
        )


register_presets(
    TDmcaPreset(
        "t-dmca-small",
        "T-DMCA decoder for a CPU: 5 layers of 256, local and memory-compressed (Liu et al. 2018).",
        layers=5,
        width=256,
        heads=8,
        inner_width=1024,
        block=256,
        experts=8,
        vocabulary=8000,
    ),
    TDmcaPreset(
        "t-dmca-tiny",
        "T-DMCA decoder for tests: two layers of 32, blocks of 8 tokens.",
        layers=2,
        width=32,
        heads=2,
        inner_width=64,
        block=8,
        experts=4,
        vocabulary=300,
    ),
)

WORDS = {"cutoffs": (20000, 40000, 200000), "tie_projs": (True,) * 4}
"""Overrides for the vocabulary of WikiText-103, in Transformer-XL's clusters."""

GATED = {"attention": RFAConfig(gated=True)}
"""Overrides for the gated form of RFA."""

register_presets(
    Variant(
        "rfa",
        "RFA language model, gated, of WikiText-103: 16 layers of 1024, 240M parameters "
        "(Peng et al. 2021, table 1, says 242M).",
        base="knn-lm",
        changes={**WORDS, **GATED},
    ),
    Variant(
        "rfa-38m",
        "RFA language model, gated, of WikiText-103: 6 layers of 512, 38M parameters "
        "(Peng et al. 2021, table 1).",
        base="knn-lm",
        changes={**size_options(6, 512, 8), **WORDS, "d_embed": 512, **GATED},
    ),
    Variant(
        "rfa-small",
        "RFA language model, gated, for a CPU: 4 layers of 256 (Peng et al. 2021).",
        base="decoder-small",
        changes=GATED,
    ),
    Variant(
        "performer",
        "Performer language model of proteins (TrEMBL): 36 layers of 512 "
        "(Choromanski et al. 2021, section 4.4).",
        base="decoder-small",
        changes={
            **size_options(36, 512, 8),
            "intermediate_size": 1024,
            "vocab_size": 30,
            "max_position_embeddings": 1024,
            "attention": PerformerConfig(features=256),
        },
    ),
    Variant(
        "performer-small",
        "Performer language model for a CPU: 4 layers of 256, 64 features (Choromanski et al. 2021).",
        base="decoder-small",
        changes={"attention": PerformerConfig(features=64)},
    ),
)
