"""Vision Transformers: ViT (Dosovitskiy et al. 2021) and DeiT (Touvron et al. 2021)."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.models.architectures import VisionConfig, VisionTransformer
from polyformer.models.checkpoints.config_mapping import (
    Option,
    Tree,
    activation,
    check_same,
    option,
    projection_biases,
)
from polyformer.models.checkpoints.families.common import pooled
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Unsqueezed, layered
from polyformer.models.checkpoints.values import options
from polyformer.nn.heads import ClassifyConfig, DistilledConfig, EmbedConfig


@dataclasses.dataclass(frozen=True)
class Patches(Converter):
    """The weights of a convolution [E, C, P_h, P_w]; ours are [E, C P_h P_w], `shape` (C, P_h, P_w)."""

    shape: tuple[int, ...] = ()

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Return [E, C P_h P_w]; a bias [E] as it is."""
        return (theirs.flatten(1) if theirs.dim() == 4 else theirs,)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return [E, C, P_h, P_w]; a bias [E] as it is."""
        return ours[0].unflatten(1, self.shape) if ours[0].dim() == 2 else ours[0]

    def for_config(self, config: Any) -> "Patches":
        """Return the converter for the patches of a model."""
        return dataclasses.replace(self, shape=(config.num_channels, *config.patch_size))


LAYER = {
    "attention.attention.[query|key|value]": "attention.[query|key|value]",
    "attention.output.dense": "attention.output",
    "layernorm_before": "block.norms.0",
    "intermediate.dense": "feedforward.up",
    "output.dense": "feedforward.down",
    "layernorm_after": "block.norms.1",
}
TRUNK = {
    "embeddings.cls_token": Unsqueezed(("class_token.weight",)),
    "embeddings.position_embeddings": Unsqueezed(("encoder.position.tables.0.weight",)),
    "embeddings.patch_embeddings.projection": Patches(("patches",)),
    **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
    "layernorm": "encoder.final_norm",
}


def _size(theirs: str, default: int, ours: str) -> Option:
    """Return an option that is one number for squares, or [height, width]."""

    def read(value: Any) -> list[int]:
        # A number stands for squares.
        pair = [value, value] if isinstance(value, int) else list(value)
        if len(pair) != 2:
            raise InputError(f"config.json: {theirs} is {quote(value)}, expected a number or [height, width]")
        return pair

    def write(value: list[int]) -> int | list[int]:
        return value[0] if value[0] == value[1] else value

    return Option(theirs, default, (ours,), read, write)


def _combined(numbers: list[float]) -> list[float]:
    """Return one number for all channels where they have the same."""
    return numbers[:1] if len({*numbers}) == 1 else numbers


# The pooler is optional: published classifiers have none.
MODEL = pooled("{base}pooler.dense", activation("pooler_act", "tanh", "activation"))
CLASSIFIER = Task(ClassifyConfig(hidden=False, dropout=0.0), {"classifier": "head.output"})


@register
class ViT(Family):
    """An encoder of image patches with a class token, which is classified."""

    model_type = "vit"
    class_prefix = "ViT"
    paper = "Dosovitskiy et al. 2021"
    objective = "image classification"
    base_model_prefix = "vit"
    template: ClassVar[Any] = VisionConfig()
    model: ClassVar[Any] = VisionTransformer
    config_mapping = options(
        "encoder",
        _size("image_size", 224, "image_size"),
        _size("patch_size", 16, "patch_size"),
        option("num_channels", 3, "num_channels"),
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        {"hidden_act": "gelu", "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-12},
        {"initializer_range": 0.02},
        option("hidden_dropout_prob", 0.0, "dropout", "encoder.dropout"),
        projection_biases("qkv_bias"),
        Option("image_mean", [0.5], ("mean",), _combined),
        Option("image_std", [0.5], ("std",), _combined),
    )
    image_options = ("image_mean", "image_std")
    other_options: ClassVar = {"add_pooling_layer": True, "pooler_output_size": None}
    ignored_options = ("encoder_stride",)
    key_mapping: ClassVar = TRUNK
    tasks: ClassVar = {"Model": MODEL, "ForImageClassification": CLASSIFIER}
    sizes = (
        *("vit-base-patch16-224", "vit-large-patch16-224", "vit-huge-patch14", "vit-base-patch32-384"),
        *("deit-tiny-patch16-224", "deit-small-patch16-224", "deit-base-patch16-224"),
    )

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for a pooler of another width than the model's."""
        check_same("pooler_output_size", "hidden_size", hub)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set whether there is a pooler."""
        if tree["head"]["kind"] == "embed" and not hub["add_pooling_layer"]:
            tree["head"]["hidden"] = False

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the option for a missing pooler, which transformers' own file does not have."""
        bare = tree["head"]["kind"] == "embed" and not tree["head"]["hidden"]
        return {"add_pooling_layer": False} if bare else {}

    def fitted(self, config: Any, stored: Collection[str]) -> Any:
        """Return the configuration without a pooler if the files have none."""
        pooled = isinstance(config.head, EmbedConfig) and config.head.hidden
        # Public classifiers are saved without the pooler that config.json describes.
        if not pooled or any(name.endswith("pooler.dense.weight") for name in stored):
            return config
        return dataclasses.replace(config, head=dataclasses.replace(config.head, hidden=False))


@register
class DeiT(ViT):
    """An encoder with a class token and a distillation token, which one of the classes classifies too."""

    model_type = "deit"
    class_prefix = "DeiT"
    paper = "Touvron et al. 2021"
    objective = "image classification with distillation from a teacher"
    base_model_prefix = "deit"
    template: ClassVar[Any] = dataclasses.replace(VisionConfig(), distillation_token=True)
    key_mapping: ClassVar = {
        **TRUNK,
        "embeddings.distillation_token": Unsqueezed(("distillation_token.weight",)),
    }
    tasks: ClassVar = {
        "Model": MODEL,
        "ForImageClassification": CLASSIFIER,
        "ForImageClassificationWithTeacher": Task(
            DistilledConfig(),
            {"cls_classifier": "head.output", "distillation_classifier": "head.distilled"},
        ),
    }
    sizes = ()
