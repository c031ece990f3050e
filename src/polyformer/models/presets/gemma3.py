"""Gemma 3: five windowed layers before each layer of full attention. Gemma Team 2025."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.patterns.implied import Full
from polyformer.attention.positions import RopeConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes, size_options

GEMMA_3 = {  # layers, width, heads, inner width, key-value heads, vocabulary
    "gemma-3-1b": ((26, 1152, 4, 6912, 1, 262144),),
}
GLOBAL, LOCAL = 1_000_000.0, 10_000.0
"""The RoPE bases of Gemma's layers with full attention and of windowed layers."""


@register_sizes(
    "Gemma 3 decoder: {layers} layers of {width}, five in six of them local, 1.0B parameters "
    "(Gemma Team 2025, table 1).",
    GEMMA_3,
)
def gemma_3(layers: int, width: int, heads: int, inner: int, groups: int, vocab: int) -> ModelConfig:
    """Return five layers with a window of 512 tokens and then one with full attention, repeated."""
    near, norm = Window(511, 0), RMSNormConfig(eps=1e-6, centered=True)
    changes = {
        "num_key_value_heads": groups,
        **size_options(layers, width, heads),
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tied": True,
        "mechanism": SoftmaxConfig(pattern=PerLayer((*[near] * 5, Full())), scale=256**-0.5),
        "head_size": 256,
        "activation": "gelu_tanh",
        "position": RopeConfig(bases=(*[LOCAL] * 5, GLOBAL)),
        "block": "sandwich",
        "norm": norm,
        "qk_norm": norm,
        "embedding.scaled": True,
        **{"pad": 0, "bos": 2, "eos": 1},
    }
    return model_config("llama-2-7b", changes)
