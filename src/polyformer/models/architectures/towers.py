"""Two towers: a text and an image become vectors of one space, whose angle says whether they belong together.

    t_i = f(text_i) / |f(text_i)|    v_j = g(image_j) / |g(image_j)|
    logits_ji = e^s v_j . t_i + b                      s, b learned; b is 0 with the objective `softmax`

The loss of B pairs, in which text i describes image i:

    softmax   (- mean_i log softmax_i(logits_i.)_i - mean_i log softmax_i(logits_.i)_i) / 2
    sigmoid   - mean_i sum_j log sigmoid(z_ij logits_ij)      z_ij = 1 for i = j, else -1

An image is classified without training by the texts of its possible labels, such as "a photo of a cat": their
probabilities are softmax(logits_j.), or with the objective `sigmoid` each sigmoid(logits_ji). Radford
et al. 2021 (CLIP), figure 3; Zhai et al. 2023 (SigLIP), algorithm 1. The cost is that of both towers.
"""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ranges import FiniteFloat
from polyformer.models.architectures.pretrained import PretrainedMixin
from polyformer.models.architectures.transformer import Transformer
from polyformer.models.architectures.vision import VisionConfig, VisionTransformer
from polyformer.models.config import ModelConfig, OriginConfig
from polyformer.models.plugins import ConfigWithImports


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowersConfig(ConfigWithImports):
    """The configuration of two towers, each with a head of vectors, such as 'embed_projected'.

    `objective`: see the module. `initial_scale`, `initial_bias`: the initial s and b. `pads_texts`: texts are
    padded to the longest text of the tower, and the padding is read as tokens, as in SigLIP.
    """

    text: ModelConfig
    image: VisionConfig
    objective: Literal["softmax", "sigmoid"] = "softmax"
    initial_scale: FiniteFloat = 2.6592  # log(1 / 0.07)
    initial_bias: FiniteFloat = 0.0
    pads_texts: bool = False
    origin: OriginConfig | None = dataclasses.field(default=None, compare=False)

    paper: ClassVar[str] = "Radford et al. 2021 (CLIP), section 2"
    weights: ClassVar[None] = None

    @property
    def towers(self) -> tuple[ModelConfig, VisionConfig]:
        """Return both towers."""
        return self.text, self.image

    @property
    def width(self) -> int:
        """Return the width of the vectors; raises `InputError` for heads without vectors of one width."""
        widths = []
        for name, tower in zip(("text", "image"), self.towers):
            if not tower.head.kind.startswith("embed"):
                raise InputError(
                    f"{name}.head: expected a head of vectors, such as 'embed_projected', got "
                    f"'{tower.head.kind}'"
                )
            widths.append(getattr(tower.head, "projection", None) or tower.head_shape().hidden_size)
        if widths[0] != widths[1]:
            raise InputError(
                f"text.head, image.head: expected vectors of one width, got {widths[0]} and {widths[1]}; set "
                "projection"
            )
        return widths[0]

    @classmethod
    def examples(cls) -> tuple["TowersConfig", ...]:
        image = VisionConfig.examples()[0].override("head", "embed_image(feature='first', projection=6)")
        text = ModelConfig.examples()[0].override("head", "embed_projected(projection=6)")
        return (cls(text=text, image=image),)


@dataclasses.dataclass(frozen=True, eq=False)
class TowersOutput:
    """The vectors of texts [B, D] and images [J, D], the logits [J, B] of images for texts, and the loss."""

    logits_per_image: Tensor
    text_vectors: Tensor
    image_vectors: Tensor
    loss: Tensor | None = None


class TwoTowers(PretrainedMixin):
    """A text encoder and an image encoder with a common space; see `forward`."""

    config_type = TowersConfig
    config: TowersConfig

    def __init__(self, config: TowersConfig):
        super().__init__(config)
        self.width = config.width
        self.text, self.image = Transformer(config.text), VisionTransformer(config.image)
        self.scale = nn.Parameter(torch.tensor(float(config.initial_scale)))
        sigmoid = config.objective == "sigmoid"
        self.bias = nn.Parameter(torch.tensor(float(config.initial_bias))) if sigmoid else None

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return vectors [B, D] of length 1 for texts [B, T]."""
        return F.normalize(self.text(input_ids, attention_mask).logits, dim=-1)

    def encode_images(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Return vectors [J, D] of length 1 for images [J, C, H, W]."""
        output = self.image(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        return F.normalize(output.logits, dim=-1)

    def logits(self, text_vectors: Tensor, image_vectors: Tensor) -> Tensor:
        """Return the logits [J, B] of images for texts, from their vectors."""
        logits = image_vectors @ text_vectors.T * self.scale.exp()
        return logits if self.bias is None else logits + self.bias

    def probabilities(self, text_vectors: Tensor, image_vectors: Tensor) -> Tensor:
        """Return the probabilities [J, B] of texts for images: they sum to 1 with the objective `softmax`."""
        logits = self.logits(text_vectors, image_vectors)
        return logits.softmax(-1) if self.bias is None else logits.sigmoid()

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        return_loss: bool = False,
    ) -> TowersOutput:
        """Read texts and images and compare all of them.

        Args:
            input_ids, attention_mask: [B, T], the texts.
            pixel_values: [J, C, H, W], normalized (`image.normalize`).
            interpolate_pos_encoding: allow images of another size than the model's.
            return_loss: also return the loss of pairs, if text i describes image i.

        Raises `InputError` for the loss of different numbers of texts and images.
        """
        texts = self.encode_texts(input_ids, attention_mask)
        images = self.encode_images(pixel_values, interpolate_pos_encoding)
        logits = self.logits(texts, images)
        return TowersOutput(logits, texts, images, self.loss_of_pairs(logits) if return_loss else None)

    def loss_of_pairs(self, logits: Tensor) -> Tensor:
        """Return the loss of logits [B, B] in which the pairs are on the diagonal."""
        if logits.shape[0] != logits.shape[1]:
            raise InputError(
                f"return_loss: expected a text for each image, got {logits.shape[1]} texts and "
                f"{logits.shape[0]} images"
            )
        if self.bias is None:
            own = torch.arange(len(logits), device=logits.device)
            return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        signs = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
        return -F.logsigmoid(signs * logits).sum(0).mean()
