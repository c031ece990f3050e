"""Models of images and of observations: classifiers, an image model, policies, Decision Transformers.

Images: the classifiers ViT (Dosovitskiy et al. 2021) and DeiT (Touvron et al. 2021), and the Image
Transformer (Parmar et al. 2018), which generates images pixel by pixel; see `training.tasks.image` for its
deviations.

Agents: GTrXL and the policies of its comparison (Parisotto et al. 2019) have sizes for a CPU; the paper's
model, `gtrxl-dmlab30`, trains for a billion steps. Decision Transformers (Chen et al. 2021, appendix A) have
the sizes for Atari and for OpenAI Gym. The environment or the data of a task sets the sizes of observations
and states, and the number of actions; until then they are the defaults of transformers' configuration.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyformer.attention.patterns import Local1D, Local2D
from polyformer.attention.positions import GridConfig
from polyformer.models.architectures import PolicyConfig, TrajectoryConfig, VisionConfig
from polyformer.models.architectures.policy import (
    DecoderTrunkConfig,
    FeedForwardTrunkConfig,
    LSTMTrunkConfig,
    TrunkConfig,
)
from polyformer.models.presets.base import (
    Preset,
    SizedPreset,
    Variant,
    image_options,
    overridden,
    register_presets,
    size_options,
)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The mean and the standard deviation of ImageNet's pixels, for each channel."""


@dataclass(frozen=True, kw_only=True)
class VitPreset(SizedPreset):
    """A classifier of square images.

    Args:
        pixels: the side of the image.
        patch: the side of a patch.
        inner_width: the width of feed-forward layers, None for four times the width.
        labels: the number of classes.
    """

    pixels: int
    patch: int
    inner_width: int | None = None
    labels: int = 1000

    def config(self) -> VisionConfig:
        config = dataclasses.replace(
            VisionConfig(), image_size=(self.pixels, self.pixels), patch_size=(self.patch, self.patch)
        )
        options = {
            **size_options(self.layers, self.width, self.heads),
            "intermediate_size": self.inner_width or 4 * self.width,
            "num_labels": self.labels,
        }
        return overridden(config, options)


register_presets(
    VitPreset(
        "vit-base-patch16-224",
        "ViT-Base image classifier: 12 layers of 768, 86.6M parameters (Dosovitskiy et al. 2021, table 1).",
        layers=12,
        width=768,
        heads=12,
        pixels=224,
        patch=16,
    ),
    VitPreset(
        "vit-large-patch16-224",
        "ViT-Large image classifier: 24 layers of 1024, 304M parameters (Dosovitskiy et al. 2021, table 1).",
        layers=24,
        width=1024,
        heads=16,
        pixels=224,
        patch=16,
    ),
    VitPreset(
        "vit-huge-patch14",
        "ViT-Huge image classifier: 32 layers of 1280, 632M parameters (Dosovitskiy et al. 2021, table 1).",
        layers=32,
        width=1280,
        heads=16,
        pixels=224,
        patch=14,
    ),
    VitPreset(
        "vit-base-patch32-384",
        "ViT-Base image classifier for 384 x 384 pixels, patches of 32 (Dosovitskiy et al. 2021).",
        layers=12,
        width=768,
        heads=12,
        pixels=384,
        patch=32,
    ),
    VitPreset(
        "vit-mini",
        "Image classifier for 32 x 32 pixels that two CPU cores train in minutes: 6 layers of 96.",
        layers=6,
        width=96,
        heads=3,
        pixels=32,
        patch=4,
        inner_width=192,
        labels=10,
    ),
)


@dataclass(frozen=True, kw_only=True)
class DeitPreset(VitPreset):
    """DeiT without a distillation token, for pixels normalized as ImageNet's."""

    pixels: int = 224
    patch: int = 16

    def config(self) -> VisionConfig:
        return dataclasses.replace(super().config(), mean=IMAGENET_MEAN, std=IMAGENET_STD)


register_presets(
    DeitPreset(
        "deit-tiny-patch16-224",
        "DeiT-Ti image classifier: 12 layers of 192, 3 heads, 5.7M parameters "
        "(Touvron et al. 2021, table 1).",
        layers=12,
        width=192,
        heads=3,
    ),
    DeitPreset(
        "deit-small-patch16-224",
        "DeiT-S image classifier: 12 layers of 384, 6 heads, 22M parameters (Touvron et al. 2021, table 1).",
        layers=12,
        width=384,
        heads=6,
    ),
    DeitPreset(
        "deit-base-patch16-224",
        "DeiT-B image classifier: 12 layers of 768, 12 heads, 87M parameters (Touvron et al. 2021, table 1).",
        layers=12,
        width=768,
        heads=12,
    ),
)


register_presets(
    Variant(
        "image-transformer",
        "Image Transformer of CIFAR-10, local in one dimension: 12 layers of 512 "
        "(Parmar et al. 2018, section 5.1).",
        base="decoder-small",
        changes={
            **size_options(12, 512, 4),
            **image_options(32, 32, 3),
            "attention": Local1D(256, 256),
            "block": "post",
            "activation": "relu",
            "dropout": 0.3,
        },
    ),
    Variant(
        "image-transformer-small",
        "Image Transformer of 8 x 8 images for a CPU, local in two dimensions: 2 layers of 128 "
        "(Parmar et al. 2018).",
        base="decoder-tiny",
        changes={**image_options(8, 8, 1, 17), "attention": Local2D((8, 8), (2, 4), (3, 2, 2))},
    ),
    Variant(
        "image-transformer-super-resolution",
        "Image Transformer from 8 x 8 to 32 x 32 pixels: 4 + 12 layers of 512 "
        "(Parmar et al. 2018, section 5.3).",
        base="transformer-base",
        changes={
            **image_options(32, 32, 3),
            "encoder.position": GridConfig(shape=(8, 8, 3)),
            "encoder.num_hidden_layers": 4,
            "decoder.num_hidden_layers": 12,
            "decoder.attention": Local1D(256, 256),
        },
    ),
    Variant(
        "image-transformer-super-resolution-small",
        "Image Transformer from 4 x 4 to 8 x 8 pixels for a CPU: 2 + 2 layers of 128 (Parmar et al. 2018).",
        base="transformer-small",
        changes={
            **size_options(2, 128, 4),
            **image_options(8, 8, 1, 17),
            "encoder.position": GridConfig(shape=(4, 4)),
            "decoder.attention": Local2D((8, 8), (2, 4), (3, 2, 2)),
            "dropout": 0.0,
        },
    ),
)


PUBLISHED = {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "memory_length": 512,
}
"""Overrides for the sizes of the paper."""

POST_NORM = DecoderTrunkConfig().override("block", "post").override("intermediate_size", 196)
"""Transformer-XL's layers, for comparison with gated ones."""


@dataclass(frozen=True, kw_only=True)
class PolicyPreset(Preset):
    """A policy of this width around `trunk`; all for a CPU have about as many parameters."""

    width: int
    trunk: TrunkConfig

    def config(self) -> PolicyConfig:
        return PolicyConfig(hidden_size=self.width, trunk=self.trunk)


register_presets(
    # The paper counts 66.4M parameters, with the layers that read images.
    PolicyPreset(
        "gtrxl-dmlab30",
        "GTrXL policy: 12 layers of 512, 8 heads, a memory of 512 steps (Parisotto et al. 2019, section 4).",
        width=512,
        trunk=overridden(DecoderTrunkConfig(), PUBLISHED),
    ),
    PolicyPreset(
        "gtrxl",
        "GTrXL policy: 1 layer of 64, 2 heads, a memory of 32 steps (Parisotto et al. 2019, section 3).",
        width=64,
        trunk=DecoderTrunkConfig(),
    ),
    PolicyPreset(
        "policy-transformer-xl",
        "Transformer-XL policy for comparison with gtrxl: post-norm, without gates, of similar size.",
        width=98,
        trunk=POST_NORM,
    ),
    PolicyPreset(
        "policy-lstm",
        "LSTM policy for comparison with gtrxl, of similar size.",
        width=104,
        trunk=LSTMTrunkConfig(),
    ),
    PolicyPreset(
        "policy-feedforward",
        "Feed-forward policy for comparison with gtrxl: without a memory, of similar size.",
        width=206,
        trunk=FeedForwardTrunkConfig(),
    ),
)


@dataclass(frozen=True, kw_only=True)
class DecisionTransformerPreset(Preset):
    """The sizes for OpenAI Gym with these overrides."""

    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> TrajectoryConfig:
        return overridden(TrajectoryConfig(), dict(self.changes))


ATARI = {
    "head.bounded": False,
    "head.action_size": 18,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "activation": "gelu",
}
"""Overrides for Atari. A linear layer reads states: the paper's convolutions over frames are not included."""

TINY = {"hidden_size": 32, "max_timesteps": 128, "num_hidden_layers": 1, "intermediate_size": 64}
"""Overrides for tests."""

register_presets(
    DecisionTransformerPreset(
        "dt-gym",
        "Decision Transformer for OpenAI Gym: 3 layers of 128, one head (Chen et al. 2021, appendix A).",
    ),
    DecisionTransformerPreset(
        "dt-atari",
        "Decision Transformer for Atari: 6 layers of 128, 8 heads, 18 actions "
        "(Chen et al. 2021, appendix A).",
        changes=ATARI,
    ),
    DecisionTransformerPreset(
        "dt-tiny",
        "Decision Transformer for tests: one layer of 32, episodes of at most 128 steps.",
        changes=TINY,
    ),
)
