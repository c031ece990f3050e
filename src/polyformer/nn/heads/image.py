"""Heads of images, which read the class token and the patches: the first token of a text and the others.

    v = h_0,  mean_i h_i  or  [h_0; mean_i h_i]      h_0 the first token, h_i the others
    classify_image    logits = W norm(v) + b
    embed_image       P norm(v)

Oquab et al. 2024 (DINOv2) classifies [h_0; mean_i h_i], Bao et al. 2022 (BEiT) the norm of the mean. norm and
P are optional.
"""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops.layers import Dropout, pool, without_first
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNormConfig, NormConfig
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape, divide_layers
from polyformer.nn.heads.classification import Problem, label_loss, random_labels

Feature = Literal["first", "others", "first_and_others"]
"""The type of an option that names v."""


def feature(hidden: Tensor, mask: Tensor | None, how: Feature) -> Tensor:
    """Return v [B, E] or [B, 2 E] for hidden [B, T, E]; a text of a single token has it as the others too."""
    parts: list[Tensor] = []
    if how != "others":
        parts.append(pool(hidden, mask, "first"))
    if how != "first":
        parts.append(pool(hidden, without_first(hidden, mask), "mean"))
    return torch.cat(parts, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageHeadConfig(HeadConfig):
    """The base class of heads of v. `pooled_norm`: of v; None for none."""

    feature: Feature = "first_and_others"
    pooled_norm: NormConfig | None = None

    pooling: ClassVar[str] = "all"

    def width(self, shape: HeadShape) -> int:
        """Return the width of v."""
        return shape.hidden_size * (2 if self.feature == "first_and_others" else 1)

    def build_norm(self, shape: HeadShape) -> nn.Module:
        """Return the norm of v."""
        return nn.Identity() if self.pooled_norm is None else self.pooled_norm.build(self.width(shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyImageConfig(ImageHeadConfig):
    """Image classifier: logits from the class token and the mean of the patches.

    `problem` as for the head `classify`.
    """

    num_labels: PositiveInt = 2
    dropout: Probability = 0.0
    problem: Problem | None = None

    kind: ClassVar[str] = "classify_image"
    paper: ClassVar[str] = "Oquab et al. 2024 (DINOv2), section 7.1"

    @classmethod
    def examples(cls) -> tuple["ClassifyImageConfig", ...]:
        return cls(num_labels=3), cls(feature="others", pooled_norm=LayerNormConfig())

    def build(self, shape: HeadShape) -> "ClassifyImage":
        return ClassifyImage(shape, self)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return labels as for the head `classify`."""
        return random_labels(self.problem, rows, self.num_labels)


class ClassifyImage(Head):
    """A head with labels as for the head `classify`; predictions [B, num_labels]."""

    supports_vocabulary_parallel = True

    def __init__(self, shape: HeadShape, config: ClassifyImageConfig):
        super().__init__()
        self.config, self.problem = config, config.problem
        self.pooled_norm, self.dropout = config.build_norm(shape), Dropout(config.dropout)
        self.output = Linear(config.width(shape), config.num_labels)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute W norm(v) + b."""
        v = self.pooled_norm(feature(inputs.hidden, inputs.mask, self.config.feature))
        logits = self.output(self.dropout(v))
        return None if labels is None else label_loss(self.problem, logits, labels), lambda: logits

    def divide_logits(self, temperature: float) -> bool:
        return divide_layers(temperature, self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedImageConfig(ImageHeadConfig):
    """Image embedding: the class token, the mean of the patches or both as a vector.

    `projection`: the width of P v; None for v. `normalize`: scales the vector to length 1.
    """

    projection: PositiveInt | None = None
    normalize: bool = True

    kind: ClassVar[str] = "embed_image"
    paper: ClassVar[str] = "Radford et al. 2021 (CLIP), section 2.3"

    @classmethod
    def examples(cls) -> tuple["EmbedImageConfig", ...]:
        return cls(), cls(feature="others", pooled_norm=LayerNormConfig(), projection=6, normalize=False)

    def build(self, shape: HeadShape) -> "EmbedImage":
        return EmbedImage(shape, self)


class EmbedImage(Head):
    """A head with predictions [B, width] and no labels."""

    supports_vocabulary_parallel = True

    def __init__(self, shape: HeadShape, config: EmbedImageConfig):
        super().__init__()
        self.config, self.normalize = config, config.normalize
        self.pooled_norm, width = config.build_norm(shape), config.projection
        self.projection = nn.Identity() if width is None else Linear(config.width(shape), width, bias=False)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute P norm(v), at length 1 if `normalize`."""
        if labels is not None:
            raise InputError("labels: the head 'embed_image' has no loss; leave labels out")
        v = self.projection(self.pooled_norm(feature(inputs.hidden, inputs.mask, self.config.feature)))
        return None, lambda: F.normalize(v, dim=-1) if self.normalize else v
