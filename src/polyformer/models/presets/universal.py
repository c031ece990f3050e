"""The Universal Transformer: one layer a side, repeated. Dehghani et al. 2019, section 2.

    h' = h^(t-1) + P^t,   A^t = LayerNorm(h' + Attention(h')),   h^t = LayerNorm(A^t + Transition(A^t))

with P^t of position and step (`step_sinusoid`), in the decoder attention to the source between the two. So it
is the Transformer of 2017 with `num_hidden_groups=1` and these positions; other numbers of steps are other
values of `num_hidden_layers`, for the same weights. The transition is the dense feed-forward, or with
`feedforward="separable_convolution"` the paper's other one; `depth="act"` lets every token choose its steps.
"""

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register


def repeated(name: str) -> ModelConfig:
    """The preset `name` with the weights of one layer in all, and positions of both kinds at every step."""
    return model_config(name, {"num_hidden_groups": 1, "position": "step_sinusoid"})


@register("universal-transformer-base")
def universal_transformer_base() -> ModelConfig:
    """Universal Transformer: one layer a side, applied in 6 steps (Dehghani et al. 2019, section 3.5).

    The sizes are those of tensor2tensor's model of this name, which has as many parameters as the base
    Transformer.
    """
    return repeated("transformer-big")


@register("universal-transformer-tiny")
def universal_transformer_tiny() -> ModelConfig:
    """Universal Transformer for tests: one layer a side, applied in three steps."""
    return repeated("transformer-tiny").override("num_hidden_layers", 3)
