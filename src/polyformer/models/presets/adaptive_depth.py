"""Encoder-decoders that choose the number of decoder layers for each token: Depth-Adaptive Transformer, CALM.

All exits share the output table; Elbayad et al. have a further output layer for each exit. CALM's three
confidence measures are the rules `softmax`, `saturation` and `classifier` (`depth.rule`).
"""

from polyformer.models.presets.base import register_variants, size_options

MULTINOMIAL = {"decoder.depth": "exits(rule=multinomial, training=aligned)"}
SOFTMAX = {"decoder.depth": "exits(rule=softmax)"}

DEPTH_ADAPTIVE = {
    "depth-adaptive": (
        "transformer-base",
        {**MULTINOMIAL, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 10000},
        "for IWSLT German to English: 6 + 6 layers of 512",
        ", section 5.1",
    ),
    "depth-adaptive-big": (
        "transformer-big",
        {**MULTINOMIAL, "vocab_size": 44000},
        "for WMT English to French: 6 + 6 layers of 1024",
        ", section 5.1",
    ),
    "depth-adaptive-small": (
        "transformer-small",
        {**MULTINOMIAL, "decoder.num_hidden_layers": 6},
        "for a CPU: 3 + 6 layers of 256",
    ),
}
CALM = {
    "calm": ("t5-v1_1-small", SOFTMAX, ", T5 1.1 with exits: 8 + 8 layers of 512", ", section 5"),
    "calm-small": (
        "t5-v1_1-small",
        {
            **SOFTMAX,
            **size_options(2, 128, 4),
            "decoder.num_hidden_layers": 6,
            "head_size": 32,
            "intermediate_size": 256,
            "vocab_size": 8000,
        },
        " for a CPU: 2 + 6 layers of 128",
    ),
}

register_variants("Depth-Adaptive Transformer {} (Elbayad et al. 2020{}).", DEPTH_ADAPTIVE)
register_variants("CALM{} (Schuster et al. 2022{}).", CALM)
