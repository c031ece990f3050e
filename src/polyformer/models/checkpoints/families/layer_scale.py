"""Vision Transformers with LayerScale: DINOv2 (Oquab et al. 2024) and BEiT (Bao et al. 2022).

Files of DINOv2 are for images of 518 x 518 pixels, and their image processors make 224 x 224: pass
`interpolate_pos_encoding=True` for these, as transformers always does. Weights for masked images are kept and
take no part in outputs.
"""

import dataclasses
from typing import Any, ClassVar

from polyformer.attention.positions import GridBiasConfig, LearnedConfig, NoPositionConfig
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.architectures import VisionConfig, VisionTransformer
from polyformer.models.checkpoints.config_mapping import ACTIVATIONS, Tree, get_path, option, with_defaults
from polyformer.models.checkpoints.families.common import FIRST_TOKEN
from polyformer.models.checkpoints.families.vit import LAYER, TRUNK, ViT
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Fused, layered
from polyformer.models.presets.images_and_agents import IMAGENET_MEAN, IMAGENET_STD
from polyformer.nn.block import LayerScaleConfig, PreNormConfig
from polyformer.nn.feedforward import DenseConfig, GatedConfig
from polyformer.nn.heads import ClassifyImageConfig, EmbedImageConfig

BLOCK = "encoder.block"
TABLE = "relative_position_bias.relative_position_bias_table"
LAYERS = "encoder.layer.{i}", "encoder.layers.{i}"
MASK = ("{base}embeddings.mask_token",)
TEMPLATE: Any = VisionConfig(head=ClassifyImageConfig(), mean=IMAGENET_MEAN, std=IMAGENET_STD).override(
    BLOCK, LayerScaleConfig(initial_scale=1.0)
)
POSITIONS = (
    *("use_absolute_position_embeddings", "use_relative_position_bias"),
    "use_shared_relative_position_bias",
)
BACKBONE = "out_features", "out_indices", "stage_names", "reshape_hidden_states", "use_mask_token"


class LayerScaleFamily(Family):
    """The base class of both families."""

    template: ClassVar[Any] = TEMPLATE
    model: ClassVar[Any] = VisionTransformer
    image_options = ViT.image_options

    def fits(self, config: Any) -> bool:
        """Return whether the model fits; without factors of sub-layers only if it was loaded as such."""
        # Without factors it is nearer to a ViT.
        loaded = config.origin is not None
        return super().fits(config) and (loaded or config.encoder.block.kind == LayerScaleConfig.kind)


@register
class DinoV2(LayerScaleFamily):
    """An encoder of image patches with a class token, trained without labels."""

    model_type = "dinov2"
    class_prefix = "Dinov2"
    paper = "Oquab et al. 2024"
    objective = "self-distillation, and patches of masked images from a teacher"
    base_model_prefix = "dinov2"
    config_mapping = (
        *with_defaults(
            ViT.config_mapping,
            {"patch_size": 14, "layer_norm_eps": 1e-6, "image_mean": [*IMAGENET_MEAN]}
            | {"image_std": [*IMAGENET_STD]},
            *("hidden_dropout_prob", "intermediate_size", "hidden_act"),
        ),
        option("hidden_dropout_prob", 0.0, "dropout"),
        option("layerscale_value", 1.0, f"{BLOCK}.initial_scale"),
    )
    other_options: ClassVar = {
        **{"mlp_ratio": 4, "hidden_act": "gelu", "use_swiglu_ffn": False, "drop_path_rate": 0.0},
    }
    ignored_options = (*BACKBONE, "apply_layernorm")
    key_mapping: ClassVar = {
        **{theirs: ours for theirs, ours in TRUNK.items() if ".layer." not in theirs},
        **layered(
            *LAYERS,
            {
                **{theirs: ours for theirs, ours in LAYER.items() if theirs.startswith("attention.")},
                "norm[1|2]": "block.norms.[0|1]",
                "layer_scale[1|2].lambda1": "block.scales.[0|1]",
                "mlp.fc[1|2]": "feedforward.[up|down]",
                "mlp.weights_in": Fused(("feedforward.gate", "feedforward.up")),
                "mlp.weights_out": "feedforward.down",
            },
        ),
    }
    tasks: ClassVar = {
        "Model": dataclasses.replace(FIRST_TOKEN, unused_keys=MASK),
        "ForImageClassification": Task(
            ClassifyImageConfig(), {"classifier": "head.output"}, unused_keys=MASK
        ),
    }

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the feed-forward, and the probability that a row skips a sub-layer."""
        gated, act = hub["use_swiglu_ffn"], ACTIVATIONS.get(hub["hidden_act"])
        if act is None:
            raise unknown("hidden_act", hub["hidden_act"], ACTIVATIONS)
        inner = _inner(hub["hidden_size"], hub["mlp_ratio"], gated)
        part = (
            GatedConfig(intermediate_size=inner, bias=True)
            if gated
            else DenseConfig(intermediate_size=inner, activation=act)
        )
        tree["encoder"]["feedforward"] = part.to_dict()
        tree["encoder"]["block"]["drop_path"] = [hub["drop_path_rate"]] if hub["drop_path_rate"] else []

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the feed-forward, and that probability."""
        part, width = tree["encoder"]["feedforward"], tree["hidden_size"]
        gated, inner = part["kind"] == "gated", part.get("intermediate_size")
        ratios = (ratio for ratio in range(1, 65) if _inner(width, ratio, gated) == inner)
        names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
        return {
            "use_swiglu_ffn": gated,
            "mlp_ratio": next(ratios, 4),
            "hidden_act": names.get(part.get("activation"), "gelu"),
            "drop_path_rate": _last(tree),
        }

    def has_tensor(self, config: Any, task: str, theirs: str) -> bool:
        """Return whether a matrix is of the model's kind of feed-forward."""
        gated = isinstance(config.encoder.feedforward, GatedConfig)
        return ".mlp." not in theirs or ("weights_" in theirs) == gated


def _inner(width: int, ratio: int, gated: bool) -> int:
    """Return the inner width, of SwiGLU two thirds of it as a multiple of 8."""
    inner = int(width * ratio)
    return (int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner


def _last(tree: Tree) -> float:
    """Return the probability of the last layer, the greatest."""
    return (get_path(tree, f"{BLOCK}.drop_path") or [0.0])[-1]


@register
class Beit(LayerScaleFamily):
    """An encoder of image patches, whose scores have biases of distances in rows and columns.

    The classifier reads the mean of the patches after a norm, or the class token. Keys have no bias.
    """

    model_type = "beit"
    class_prefix = "Beit"
    paper = "Bao et al. 2022"
    objective = "visual tokens of masked patches"
    base_model_prefix = "beit"
    template: ClassVar[Any] = (
        VisionConfig(head=ClassifyImageConfig())
        .override(BLOCK, LayerScaleConfig())
        .override("encoder.attention.bias", ["query", "value", "output"])
        .override("encoder.final_norm", False)
    )
    config_mapping = tuple(option for option in ViT.config_mapping if option.theirs != "qkv_bias")
    other_options: ClassVar = {
        **{"use_absolute_position_embeddings": False, "use_relative_position_bias": False},
        **{"use_shared_relative_position_bias": False, "use_mean_pooling": True},
        **{"layer_scale_init_value": 0.1, "drop_path_rate": 0.1},
    }
    ignored_options = (
        *BACKBONE,
        *("vocab_size", "pool_scales", "use_auxiliary_head", "auxiliary_loss_weight", "auxiliary_channels"),
        *("auxiliary_num_convs", "auxiliary_concat_input", "semantic_loss_ignore_index", "add_fpn"),
    )
    key_mapping: ClassVar = {
        **TRUNK,
        **layered(
            *LAYERS,
            {"lambda_[1|2]": "block.scales.[0|1]"},
        ),
        f"encoder.layer.{{i}}.attention.attention.{TABLE}": "encoder.position.tables.{i}.weight",
        f"encoder.{TABLE}": "encoder.position.tables.0.weight",
    }
    ignored_keys = ("*relative_position_index",)
    tasks: ClassVar = {
        "Model": Task(
            EmbedImageConfig(normalize=False),
            {"{base}pooler.layernorm": "head.pooled_norm"},
            prefixed=False,
            unused_keys=MASK,
        ),
        "ForImageClassification": Task(
            ClassifyImageConfig(),
            {"{base}pooler.layernorm": "head.pooled_norm", "classifier": "head.output"},
            unused_keys=MASK,
        ),
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for several kinds of positions at a time, and tables of other images."""
        kinds = [name for name in POSITIONS if hub[name]]
        if len(kinds) > 1:
            raise InputError(
                f"config.json: {kinds[1]} is true next to {kinds[0]}; only one of them is supported"
            )
        sizes = [hub["image_size"], hub["patch_size"]]
        squares = all(isinstance(size, int) or len({*size}) == 1 for size in sizes)
        if kinds and kinds != [POSITIONS[0]] and not squares:
            raise InputError(
                f"config.json: image_size is {quote(sizes[0])} in patches of {quote(sizes[1])}; with "
                f"{kinds[0]}, transformers takes rows for columns if an image is not square"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set positions, factors of sub-layers, and what the head reads."""
        encoder, layers = tree["encoder"], hub["num_hidden_layers"]
        absolute, own, shared = (hub[name] for name in POSITIONS)
        grid = tuple(size // side for size, side in zip(tree["image_size"], tree["patch_size"]))
        position = LearnedConfig() if absolute else NoPositionConfig()
        if own or shared:
            position = GridBiasConfig(shape=grid, shared=shared)
        encoder["position"] = position.to_dict()
        scale, rate = hub["layer_scale_init_value"], hub["drop_path_rate"]
        rates = [rate * (layer / max(layers - 1, 1)) for layer in range(layers)]
        block = LayerScaleConfig(initial_scale=scale, drop_path=tuple(rates) if any(rates) else ())
        encoder["block"] = (block if scale > 0 else PreNormConfig()).to_dict()
        encoder["final_norm"] = not hub["use_mean_pooling"]
        if tree["head"]["kind"] in ("classify_image", "embed_image"):
            norm = LayerNormConfig(eps=hub["layer_norm_eps"]) if hub["use_mean_pooling"] else None
            tree["head"]["pooled_norm"] = None if norm is None else norm.to_dict()
            tree["head"]["feature"] = "others" if hub["use_mean_pooling"] else "first"

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of positions, factors and heads."""
        position, block = tree["encoder"]["position"], tree["encoder"]["block"]
        grid = position["kind"] == "grid_bias"
        kinds = position["kind"] == "learned", grid and not position["shared"], grid and position["shared"]
        return {
            **dict(zip(POSITIONS, kinds)),
            "use_mean_pooling": not tree["encoder"]["final_norm"],
            "layer_scale_init_value": block.get("initial_scale", 0.0),
            "drop_path_rate": _last(tree),
        }

    def has_tensor(self, config: Any, task: str, theirs: str) -> bool:
        """Return whether a table is of the model's kind of positions."""
        position = config.encoder.position
        if theirs.endswith("position_embeddings"):
            return isinstance(position, LearnedConfig)
        if not theirs.endswith(TABLE):
            return True
        grid = isinstance(position, GridBiasConfig)
        return grid and position.shared == (".layer." not in theirs)
