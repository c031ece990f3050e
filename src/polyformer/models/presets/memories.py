"""Language models with memories and stores: Compressive and Memorizing Transformers, SPALM, kNN-LM.

`knn-lm` is the language model of the paper, which is Baevski and Auli's (2019), with adaptive embeddings; its
datastore is built from a trained model (`polyformer datastore`). SPALM has the sizes of Transformer-XL and a
plain token table, from which it reads the vectors of neighbours.
"""

from polyformer.attention.patterns import Full
from polyformer.models.presets.base import register_variants, size_options
from polyformer.nn.heads import AdaptiveSoftmaxConfig, SemiparametricConfig
from polyformer.nn.memory import CompressiveConfig, MemorizingConfig
from polyformer.nn.stack import AdaptiveConfig

WORDS = 267744
"""WikiText-103's words, padded to a multiple of 8."""

SEGMENTS = {"position": "transformer_xl", "memory": "recurrent(length=128)"}
"""Overrides for the small models: Transformer-XL's memory and positions."""

COMPRESSIVE = {
    "compressive-transformer": (
        "transformer-xl-large",
        {"attention": Full(), "memory": CompressiveConfig(length=500, compressed_length=1500, rate=4)},
        "of WikiText-103: 18 layers of 1024, 500 tokens, 1500 vectors",
        ", section 5",
    ),
    "compressive-transformer-enwik8": (
        "transformer-xl-enwik8-24",
        {"attention": Full(), "memory": CompressiveConfig(length=768, compressed_length=1152, rate=3)},
        "of enwik8's bytes: 24 layers of 1024, 768 tokens, 1152 vectors",
        ", section 5",
    ),
    "compressive-transformer-small": (
        "decoder-small",
        {**SEGMENTS, "memory": CompressiveConfig(length=128, compressed_length=128, rate=4)},
        "for a CPU: 4 layers of 256, 128 tokens and 128 vectors",
    ),
}
MEMORIZING = {
    # "Approximately 200M": 184M with the output tied to the token table, 217M without.
    "memorizing-transformer": (
        "decoder-small",
        {
            **size_options(12, 1024, 8),
            "vocab_size": 32000,
            "position": "t5",
            "activation": "relu",
            "memory": MemorizingConfig(length=512, store=65536, neighbours=32),
        },
        ": 12 layers of 1024, a store of 65,536 tokens, 184M parameters",
        ", section 4.2",
    ),
    "memorizing-transformer-small": (
        "decoder-small",
        {**SEGMENTS, "memory": MemorizingConfig(length=128, store=8192)},
        " for a CPU: 4 layers of 256, a store of 8,192 tokens",
    ),
}
SPALM = {
    "spalm": (
        "transformer-xl-base",
        {"embedding.adaptive": None, "attention": Full(), "head": SemiparametricConfig()},
        "of WikiText-103 in Transformer-XL's sizes: 16 layers of 410",
        ", section 4.1",
    ),
    "spalm-small": (
        "decoder-small",
        {**SEGMENTS, "head": SemiparametricConfig()},
        "for a CPU: 4 layers of 256",
    ),
}
KNN_LM = {
    "knn-lm": (
        "decoder-small",
        {
            **size_options(16, 1024, 8),
            "vocab_size": WORDS,
            "embedding.adaptive": AdaptiveConfig(cutoffs=(20000, 60000), d_embed=1024),
            "head": AdaptiveSoftmaxConfig(tie_projs=(True,) * 3),
            "position": "sinusoidal",
            "activation": "relu",
            "embedding.scaled": True,
            "final_norm": False,
        },
        "for WikiText-103: 16 layers of 1024, 247M parameters",
        ", section 4",
    ),
    "knn-lm-small": (
        "decoder-small",
        {"position": "sinusoidal", "embedding.scaled": True},
        "for a CPU: 4 layers of 256",
    ),
}

register_variants("Compressive Transformer {} (Rae et al. 2020{}).", COMPRESSIVE)
register_variants("Memorizing Transformer{} (Wu et al. 2022{}).", MEMORIZING)
register_variants("SPALM {} (Yogatama et al. 2021{}).", SPALM)
register_variants("Language model of kNN-LM {} (Khandelwal et al. 2020{}).", KNN_LM)
