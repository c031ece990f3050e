"""Systems with attention in linear time: Linformer, random feature attention (RFA) and Performer.

The paper on RFA does not give the cut-offs of its vocabulary; Transformer-XL's lead to about as many
parameters.
"""

from polyformer.attention.mechanisms import LinformerConfig, PerformerConfig, RFAConfig
from polyformer.models.presets.base import register_variants, size_options

WORDS = {"cutoffs": (20000, 40000, 200000), "tie_projs": (True,) * 4}
GATED = {"attention": RFAConfig(gated=True)}

LINFORMER = {
    "linformer": (
        "roberta-base",
        {"attention": LinformerConfig(max_length=512, k=256, sharing="layer")},
        "for 512 tokens, k = 256, shared by all layers: 12 layers of 768",
        ", table 2",
    ),
    "linformer-small": (
        "bert-base",
        {
            **size_options(4, 256, 8),
            "vocab_size": 8000,
            "attention": LinformerConfig(max_length=512, k=64, sharing="layer"),
        },
        "for a CPU, k = 64: 4 layers of 256",
    ),
}
RFA = {
    "rfa": (
        "knn-lm",
        {**WORDS, **GATED},
        "of WikiText-103: 16 layers of 1024, 240M parameters",
        ", table 1, says 242M",
    ),
    "rfa-38m": (
        "knn-lm",
        {**size_options(6, 512, 8), **WORDS, "d_embed": 512, **GATED},
        "of WikiText-103: 6 layers of 512, 38M parameters",
        ", table 1",
    ),
    "rfa-small": ("decoder-small", GATED, "for a CPU: 4 layers of 256"),
}
PERFORMER = {
    "performer": (
        "decoder-small",
        {
            **size_options(36, 512, 8),
            "intermediate_size": 1024,
            "vocab_size": 30,
            "max_position_embeddings": 1024,
            "attention": PerformerConfig(features=256),
        },
        "of proteins (TrEMBL): 36 layers of 512",
        ", section 4.4",
    ),
    "performer-small": (
        "decoder-small",
        {"attention": PerformerConfig(features=64)},
        "for a CPU: 4 layers of 256, 64 features",
    ),
}

register_variants("Linformer encoder {} (Wang et al. 2020{}).", LINFORMER)
register_variants("RFA language model, gated, {} (Peng et al. 2021{}).", RFA)
register_variants("Performer language model {} (Choromanski et al. 2021{}).", PERFORMER)
