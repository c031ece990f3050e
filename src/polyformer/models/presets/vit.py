"""Vision Transformers: ViT (Dosovitskiy et al. 2021) and DeiT (Touvron et al. 2021)."""

import dataclasses

from polyformer.models.architectures import VisionConfig
from polyformer.models.presets.base import overridden, register, sizes

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@register("vit-base-patch16-224")
def vit_base_patch16_224() -> VisionConfig:
    """ViT-Base image classifier: 12 layers of 768, 86.6M parameters (Dosovitskiy et al. 2021, table 1)."""
    return VisionConfig()


@register("vit-large-patch16-224")
def vit_large_patch16_224() -> VisionConfig:
    """ViT-Large image classifier: 24 layers of 1024, 304M parameters (Dosovitskiy et al. 2021, table 1)."""
    return overridden(VisionConfig(), sizes(24, 1024, 16))


@register("vit-huge-patch14")
def vit_huge_patch14() -> VisionConfig:
    """ViT-Huge image classifier: 32 layers of 1280, 632M parameters (Dosovitskiy et al. 2021, table 1).

    16 heads, patches of 14.
    """
    return overridden(dataclasses.replace(VisionConfig(), patch_size=(14, 14)), sizes(32, 1280, 16))


@register("vit-base-patch32-384")
def vit_base_patch32_384() -> VisionConfig:
    """ViT-Base image classifier for 384 x 384 pixels, patches of 32 (Dosovitskiy et al. 2021).

    88.3M parameters.
    """
    return dataclasses.replace(VisionConfig(), patch_size=(32, 32), image_size=(384, 384))


@register("deit-tiny-patch16-224")
def deit_tiny_patch16_224() -> VisionConfig:
    """DeiT-Ti image classifier: 12 layers of 192, 3 heads, 5.7M parameters (Touvron et al. 2021, table 1)."""
    return _deit(192, 3)


@register("deit-small-patch16-224")
def deit_small_patch16_224() -> VisionConfig:
    """DeiT-S image classifier: 12 layers of 384, 6 heads, 22M parameters (Touvron et al. 2021, table 1)."""
    return _deit(384, 6)


@register("deit-base-patch16-224")
def deit_base_patch16_224() -> VisionConfig:
    """DeiT-B image classifier: 12 layers of 768, 12 heads, 87M parameters (Touvron et al. 2021, table 1)."""
    return _deit(768, 12)


@register("vit-mini")
def vit_mini() -> VisionConfig:
    """Image classifier for 32 x 32 pixels that two CPU cores train in minutes: 6 layers of 96."""
    config = dataclasses.replace(VisionConfig(), image_size=(32, 32), patch_size=(4, 4))
    return overridden(config, {**sizes(6, 96, 3), "intermediate_size": 192, "num_labels": 10})


def _deit(width: int, heads: int) -> VisionConfig:
    """Return the sizes of DeiT without a distillation token, for pixels normalized as ImageNet's."""
    config = dataclasses.replace(VisionConfig(), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return overridden(config, sizes(12, width, heads))
