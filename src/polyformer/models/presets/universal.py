"""The Universal Transformer: one repeated layer per stack. Dehghani et al. 2019, section 2.

    h' = h^(t-1) + P^t,   A^t = LayerNorm(h' + Attention(h')),   h^t = LayerNorm(A^t + Transition(A^t))

with P^t of position and step (`step_sinusoid`); the decoder has cross-attention between the two. This is the
Transformer of 2017 with `num_hidden_groups=1` and these positions; `num_hidden_layers` is the number of steps
and does not change the weights. The transition is the dense feed-forward, or the paper's alternative with
`feedforward="separable_convolution"`; `depth="act"` lets every token choose its steps.
"""

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes

SIZES = {  # the preset with the sizes, and the number of steps
    # tensor2tensor's model of this name, which has as many parameters as the base Transformer
    "universal-transformer-base": (
        ("transformer-big", 6),
        ": one layer a side, applied in 6 steps (Dehghani et al. 2019, section 3.5)",
    ),
    "universal-transformer-tiny": (
        ("transformer-tiny", 3),
        " for tests: one layer a side, applied in three steps",
    ),
}


@register_sizes("Universal Transformer{}.", SIZES)
def universal(name: str, steps: int) -> ModelConfig:
    """Return the preset `name` with one shared layer per stack, applied in `steps` steps."""
    options = {"num_hidden_groups": 1, "position": "step_sinusoid", "num_hidden_layers": steps}
    return model_config(name, options)
