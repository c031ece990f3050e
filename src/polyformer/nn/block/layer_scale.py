"""LayerScale: a learned factor for each channel of what a sub-layer adds, x = x + m * l * f(norm(x)).

l is a learned vector [E] of each sub-layer, with a small initial value: a deep stack begins close to the
identity. m is 1, or with `drop_path` a random number of each row of a batch in training,

    m = b / (1 - p)    b = 0 with probability p, else 1

so that rows skip sub-layers by chance (stochastic depth). Touvron et al. 2021 (CaiT), section 2.1; Huang
et al. 2016, section 3. The cost is a product per channel. Image encoders such as BEiT and DINOv2 have these
layers.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.ops.norms import NormConfig
from polyformer.core.ranges import FiniteFloat, Probability
from polyformer.nn.block.wirings import BlockConfig, PreNorm, PreNormConfig, SubLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerScaleConfig(BlockConfig):
    """LayerScale block: pre-norm with a learned factor for each channel of what a sub-layer adds.

    `initial_scale`: the initial value of the factors. `drop_path`: the probability that a row skips a
    sub-layer in training, a number for each layer or the last for all further layers.
    """

    initial_scale: FiniteFloat = 0.1
    drop_path: tuple[Probability, ...] = ()

    kind: ClassVar[str] = "layer_scale"
    paper: ClassVar[str] = "Touvron et al. 2021 (CaiT), section 2.1"

    @classmethod
    def examples(cls) -> tuple["LayerScaleConfig", ...]:
        return cls(), cls(initial_scale=0.5, drop_path=(0.0, 0.3))

    def for_layer(self, layer: int) -> "LayerScaleConfig":
        """Return the configuration with the probability of layer `layer` alone."""
        rates = self.drop_path
        return dataclasses.replace(self, drop_path=(rates[min(layer, len(rates) - 1)],)) if rates else self

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "LayerScale":
        kind = DroppedLayerScale if any(self.drop_path) else LayerScale
        return kind(hidden_size, sublayers, norm, dropout, self)


class LayerScale(PreNorm):
    """The wiring with factors [E] of each sub-layer."""

    def __init__(
        self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: LayerScaleConfig
    ):
        super().__init__(hidden_size, norms, norm, dropout, PreNormConfig())
        self.scales = nn.ParameterList(torch.full((hidden_size,), config.initial_scale) for _ in range(norms))

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = x + dropout(l * f(norm(x))) for each f in turn."""
        scaled = [partial(self._scaled, f, scale) for f, scale in zip(sublayers, self.scales)]
        return super().forward(x, scaled, valid)

    def _scaled(self, sublayer: SubLayer, scale: Tensor, x: Tensor) -> Tensor:
        return sublayer(x) * scale


class DroppedLayerScale(LayerScale):
    """The wiring in which rows skip sub-layers by chance in training."""

    def __init__(
        self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: LayerScaleConfig
    ):
        super().__init__(hidden_size, norms, norm, dropout, config)
        self.drop_path = config.drop_path[0]

    def _scaled(self, sublayer: SubLayer, scale: Tensor, x: Tensor) -> Tensor:
        y = super()._scaled(sublayer, scale, x)
        if not self.training:
            return y
        # the mean over the random numbers is y
        kept = torch.rand(len(y), 1, 1, device=y.device) >= self.drop_path
        return y * (kept / (1 - self.drop_path)).to(y.dtype)
