"""Systems with other attention: sparse, with fewer keys, or in linear time.

Sparse by place are Sparse Transformer and Blockwise BERT, by content Routing Transformer and Sinkhorn, by
learned distance adaptive spans. Deviations. Sparse Transformer: initial weights are not scaled by depth
(section 5.2), and all heads of a layer see the same columns of a block. Its model for CIFAR-10 is missing:
its queries and keys have half the width of its values. Routing: see `mechanisms.routing`.

Linformer projects keys and values along the length; T-DMCA's memory-compressed layers alternate with local
ones; random feature attention (RFA) and Performer replace the softmax by features. The paper on RFA does not
give the cut-offs of its vocabulary; Transformer-XL's lead to about as many parameters.
"""

from dataclasses import dataclass

from polyformer.attention.mechanisms import (
    AdaptiveSpanConfig,
    AlternateConfig,
    LinformerConfig,
    MemoryCompressedConfig,
    PerformerConfig,
    RFAConfig,
    RoutingConfig,
    SinkhornConfig,
    SoftmaxConfig,
)
from polyformer.attention.patterns import (
    BlockWindow,
    Blockwise,
    Fixed,
    Pattern,
    PerHead,
    PerLayer,
    Strided,
    Window,
)
from polyformer.attention.positions import GridConfig, ShawConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import SizedPreset, Variant, image_options, register_presets, size_options
from polyformer.nn.feedforward import AlternateFeedForwardConfig, DenseConfig, ExpertsConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

STRIDED = PerLayer((Window(128, 0), Strided(128)))
"""Layers that alternate between the nearest pixels and a column of them."""

register_presets(
    Variant(
        "sparse-transformer",
        "Sparse Transformer of enwik8's bytes, fixed pattern: 30 layers of 512, 95M parameters "
        "(Child et al. 2019, table 1).",
        base="decoder-small",
        changes={
            **size_options(30, 512, 8),
            "vocab_size": 256,
            "max_position_embeddings": 12288,
            "position": GridConfig(shape=(96, 128)),
            "attention": Fixed(128, 32),
            "dropout": 0.4,
        },
    ),
    Variant(
        "sparse-transformer-images",
        "Sparse Transformer of 64 x 64 images, strided pattern: 48 layers of 512, 152M parameters "
        "(Child et al. 2019, table 1).",
        base="decoder-small",
        changes={
            **size_options(48, 512, 16),
            **image_options(64, 64, 3),
            "attention": STRIDED,
            "dropout": 0.01,
        },
    ),
    Variant(
        "sparse-transformer-small",
        "Sparse Transformer for a CPU, fixed pattern: 4 layers of 256 (Child et al. 2019).",
        base="decoder-small",
        changes={"attention": Fixed(32, 4)},
    ),
    Variant(
        "sparse-transformer-strided-small",
        "Sparse Transformer for a CPU, strided pattern: 4 layers of 256 (Child et al. 2019).",
        base="decoder-small",
        changes={"attention": PerHead((Window(16, 0), Strided(16)))},
    ),
    Variant(
        "sparse-transformer-images-small",
        "Sparse Transformer of 8 x 8 images for a CPU, strided pattern: 2 layers of 128 (Child et al. 2019).",
        base="decoder-tiny",
        changes={**image_options(8, 8, 1, 17), "attention": PerLayer((Window(8, 0), Strided(8)))},
    ),
)


def blockwise(length: int, heads: tuple[int, ...]) -> Pattern:
    """Return a block for each of `heads`: `heads[s]` heads attend `s` blocks further on, cyclically."""
    return PerHead(Blockwise.heads(-(-length // len(heads)), len(heads), heads))


register_presets(
    Variant(
        "blockwise-bert",
        "Blockwise BERT (BlockBERT) for 512 tokens, 2 blocks: 12 layers of 768 "
        "(Qiu et al. 2020, section 4.1).",
        base="bert-base",
        changes={"attention": blockwise(512, (10, 2))},
    ),
    Variant(
        "blockwise-bert-1024",
        "Blockwise BERT (BlockBERT) for 1024 tokens, 3 blocks: 12 layers of 768 "
        "(Qiu et al. 2020, section 4.1).",
        base="bert-base",
        changes={"max_position_embeddings": 1024, "attention": blockwise(1024, (8, 2, 2))},
    ),
    Variant(
        "blockwise-bert-small",
        "Blockwise BERT (BlockBERT) for a CPU and 128 tokens: 4 layers of 256 (Qiu et al. 2020).",
        base="bert-base",
        changes={**size_options(4, 256, 8), "vocab_size": 8000, "attention": blockwise(128, (6, 2))},
    ),
)


def routed(local: int, routed: int, clusters: int, window: int, local_heads: int) -> AlternateConfig:
    """Return `local` layers of local attention below `routed` layers, in which the other heads route."""
    near = SoftmaxConfig(pattern=Window(window - 1, 0))
    far = RoutingConfig(clusters=clusters, window=window, local_heads=local_heads, local_window=window)
    return AlternateConfig(mechanisms=(near,) * local + (far,) * routed)


register_presets(
    Variant(
        "routing-transformer",
        "Routing Transformer of CIFAR-10: 12 layers of 512, the last two route half of the heads "
        "(Roy et al. 2021, table 1).",
        base="decoder-small",
        changes={
            **size_options(12, 512, 8),
            **image_options(32, 32, 3),
            "attention": routed(10, 2, 6, 512, 4),
        },
    ),
    Variant(
        "routing-transformer-small",
        "Routing Transformer for a CPU: 4 layers of 256, the last two route half of their heads "
        "(Roy et al. 2021).",
        base="decoder-small",
        changes={"attention": routed(2, 2, 8, 64, 4)},
    ),
)

register_presets(
    Variant(
        "sinkhorn",
        "Sinkhorn Transformer in tensor2tensor's base size: 6 layers of 512, blocks of 32 tokens "
        "(Tay et al. 2020, section 5.2).",
        base="decoder-small",
        changes={
            **size_options(6, 512, 8),
            "vocab_size": 32000,
            "attention": SinkhornConfig(block_size=32, max_length=512),
            "activation": "relu",
        },
    ),
    Variant(
        "sinkhorn-small",
        "Sinkhorn Transformer for a CPU: 4 layers of 256, blocks of 16 tokens (Tay et al. 2020).",
        base="decoder-small",
        changes={"attention": SinkhornConfig(block_size=16, max_length=512)},
    ),
)


def spans(longest: int) -> dict[str, object]:
    """Return overrides for adaptive spans; all layers share the vectors of distances."""
    return {
        "attention": AdaptiveSpanConfig(max_span=longest),
        "position": ShawConfig(clip=longest, values=False, shared=True),
    }


register_presets(
    Variant(
        "adaptive-span",
        "Transformer with adaptive spans of text8's letters: 12 layers of 512, 38M parameters "
        "(Sukhbaatar et al. 2019, table 1).",
        base="decoder-small",
        changes={
            **size_options(12, 512, 8),
            "vocab_size": 27,
            **spans(8192),
            "activation": "relu",
            "block": "post",
        },
    ),
    Variant(
        "adaptive-span-large",
        "Transformer with adaptive spans of text8's letters: 24 layers of 768, 209M parameters "
        "(Sukhbaatar et al. 2019, table 1).",
        base="decoder-small",
        changes={
            **size_options(24, 768, 8),
            "intermediate_size": 4096,
            "vocab_size": 27,
            **spans(8192),
            "activation": "relu",
            "block": "post",
        },
    ),
    Variant(
        "adaptive-span-small",
        "Transformer with adaptive spans for a CPU: 4 layers of 256 (Sukhbaatar et al. 2019).",
        base="decoder-small",
        changes=spans(256),
    ),
)


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
