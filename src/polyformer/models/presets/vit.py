"""Vision Transformers: ViT (Dosovitskiy et al. 2021) and DeiT (Touvron et al. 2021)."""

import dataclasses

from polyformer.models.architectures import VisionConfig
from polyformer.models.presets.base import overridden, register_sizes, size_options

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


VIT = {  # layers, width, heads, side of the image, side of a patch
    "vit-base-patch16-224": (
        (12, 768, 12, 224, 16),
        "Base",
        ": 12 layers of 768, 86.6M parameters",
        ", table 1",
    ),
    "vit-large-patch16-224": (
        (24, 1024, 16, 224, 16),
        "Large",
        ": 24 layers of 1024, 304M parameters",
        ", table 1",
    ),
    "vit-huge-patch14": (
        (32, 1280, 16, 224, 14),
        "Huge",
        ": 32 layers of 1280, 632M parameters",
        ", table 1",
    ),
    "vit-base-patch32-384": ((12, 768, 12, 384, 32), "Base", " for 384 x 384 pixels, patches of 32", ""),
}
DEIT = {
    "deit-tiny-patch16-224": ((12, 192, 3), "Ti", "5.7M"),
    "deit-small-patch16-224": ((12, 384, 6), "S", "22M"),
    "deit-base-patch16-224": ((12, 768, 12), "B", "87M"),
}
MINI = {"vit-mini": ((6, 96, 3, 32, 4, 192, 10),)}


@register_sizes("ViT-{} image classifier{} (Dosovitskiy et al. 2021{}).", VIT)
@register_sizes(
    "Image classifier for 32 x 32 pixels that two CPU cores train in minutes: {layers} layers of {width}.",
    MINI,
)
def vit(
    layers: int,
    width: int,
    heads: int,
    pixels: int,
    patch: int,
    *,
    inner: int | None = None,
    labels: int = 1000,
) -> VisionConfig:
    """Return a classifier of square images; `pixels` and `patch` are side lengths."""
    config = dataclasses.replace(VisionConfig(), image_size=(pixels, pixels), patch_size=(patch, patch))
    options = {
        **size_options(layers, width, heads),
        "intermediate_size": inner or 4 * width,
        "num_labels": labels,
    }
    return overridden(config, options)


@register_sizes(
    "DeiT-{} image classifier: {layers} layers of {width}, {heads} heads, {} parameters "
    "(Touvron et al. 2021, table 1).",
    DEIT,
)
def deit(layers: int, width: int, heads: int) -> VisionConfig:
    """Return DeiT without a distillation token, for pixels normalized as ImageNet's."""
    config = vit(layers, width, heads, 224, 16)
    return dataclasses.replace(config, mean=IMAGENET_MEAN, std=IMAGENET_STD)
