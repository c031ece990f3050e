"""CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): text and image encoders with a common space.

Each tower is a family of its own, with the configurations `text_config` and `vision_config` of the whole.
Differences from transformers: CLIP's texts end with the first end token or, without it, with their last
token; SigLIP's texts are pooled in their last real token, which is the last token, as they are padded to the
longest length without a mask. The norm after CLIP's image encoder is applied to all tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from polyformer.attention.positions import LearnedConfig
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.architectures import TowersConfig, TwoTowers, VisionConfig, VisionTransformer
from polyformer.models.checkpoints.config_mapping import Option, Tree, option, with_defaults
from polyformer.models.checkpoints.families.vit import Patches, ViT
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Fused, Link, Unsqueezed, layered
from polyformer.models.checkpoints.values import check_values, options, special
from polyformer.models.config import ModelConfig, OriginConfig
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import EmbedAttendedConfig, EmbedImageConfig, EmbedProjectedConfig, HeadConfig
from polyformer.nn.stack import StackConfig

LAYER = {
    "self_attn.[q|k|v|out]_proj": "attention.[query|key|value|output]",
    "layer_norm[1|2]": "block.norms.[0|1]",
    "mlp.fc[1|2]": "feedforward.[up|down]",
}
STACK = StackConfig(
    position=LearnedConfig(),
    block=PreNormConfig(),
    norm=LayerNormConfig(eps=1e-5),
    feedforward=DenseConfig(activation="quick_gelu"),
    dropout=0.0,
)
TEXT = {"intermediate_size": 2048, "max_position_embeddings": 77, "num_attention_heads": 8}
IGNORED = ("initializer_factor", "use_cache")
PROJECTION = option("projection_dim", 512, "projection")


def text_keys(stack: str) -> dict[str, str | Converter]:
    """Return the tensors of a text encoder, which is our `stack`."""
    return {
        "embeddings.token_embedding": "tokens",
        "embeddings.position_embedding": f"{stack}.position.tables.0",
        **layered("encoder.layers.{i}", f"{stack}.layers.{{i}}", LAYER),
        "final_layer_norm": f"{stack}.final_norm",
    }


def text_options(stack: str, activation: str, eps: float, **sizes: int) -> tuple[Option, ...]:
    """Return the options of a text encoder with these defaults."""
    return options(
        stack,
        {"vocab_size": 49408, "hidden_size": 512, **TEXT, **sizes, "num_hidden_layers": 12},
        {"hidden_act": activation, "layer_norm_eps": eps, "attention_dropout": 0.0},
        {name: token for name, token in special(1, 49406, 49407).items() if name != "tie_word_embeddings"},
    )


@register
class ClipText(Family):
    """The text encoder of CLIP: causal layers, whose end token is the vector of a text."""

    model_type = "clip_text_model"
    class_prefix = "CLIPText"
    paper = "Radford et al. 2021"
    objective = "texts and images that belong together"
    base_model_prefix = "text_model"
    template = ModelConfig(
        vocab_size=49408, decoder=STACK, initializer_range=0.02, head=EmbedProjectedConfig()
    )
    config_mapping = (
        *text_options("decoder", "quick_gelu", 1e-5),
        option("initializer_range", 0.02, "initializer_range"),
    )
    ignored_options = IGNORED
    key_mapping = text_keys("decoder")
    ignored_keys = ("*embeddings.position_ids",)
    tasks: ClassVar = {
        "ModelWithProjection": Task(
            EmbedProjectedConfig(normalize=False), {"text_projection": "head.projection"}, (PROJECTION,)
        ),
    }

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the end token; in the first files it is 2, and the token of the greatest id is meant."""
        if tree["head"]["kind"] == EmbedProjectedConfig.kind:
            end = hub["eos_token_id"]
            tree["head"]["end_token"] = hub["vocab_size"] - 1 if end == 2 else end


@register
class SiglipText(Family):
    """The text encoder of SigLIP: its last token is the vector of a text."""

    model_type = "siglip_text_model"
    class_prefix = "SiglipText"
    paper = "Zhai et al. 2023"
    objective = "texts and images that belong together"
    base_model_prefix = "text_model"
    template = ModelConfig(
        vocab_size=32000, encoder=STACK, initializer_range=0.02, head=EmbedProjectedConfig()
    )
    config_mapping = text_options(
        "encoder",
        "gelu_pytorch_tanh",
        1e-6,
        **{"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        max_position_embeddings=64,
    )
    other_options: ClassVar = {"projection_size": None}
    ignored_options = IGNORED
    key_mapping = text_keys("encoder")
    ignored_keys = ("*embeddings.position_ids",)
    tasks: ClassVar = {
        "Model": Task(
            EmbedProjectedConfig(projection_bias=True, normalize=False),
            {"{base}head": "head.projection"},
            prefixed=False,
        ),
    }

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the width of the space."""
        if tree["head"]["kind"] == EmbedProjectedConfig.kind:
            tree["head"]["projection"] = hub["projection_size"] or hub["hidden_size"]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the width of the space."""
        return {"projection_size": tree["head"].get("projection") or tree["hidden_size"]}


CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
IMAGE: Any = VisionConfig(normed=True, patch_bias=False, encoder=STACK)
SIGLIP_IMAGE: Any = VisionConfig(class_token=False, encoder=STACK, head=EmbedAttendedConfig())
IMAGE_KEYS = {
    "embeddings.patch_embedding": Patches(("patches",)),
    "embeddings.position_embedding": "encoder.position.tables.0",
    **layered("encoder.layers.{i}", "encoder.layers.{i}", LAYER),
    "post_layernorm": "encoder.final_norm",
}
IMAGE_OPTIONS = (
    *(
        option
        for option in ViT.config_mapping
        if not option.theirs.endswith(("dropout_prob", "qkv_bias", "image_mean", "image_std"))
    ),
    *options("encoder", {"attention_dropout": 0.0}),
)


class ImageTower(Family):
    """The base class of both image encoders. Square images and patches are required, as in transformers."""

    paper = "Radford et al. 2021"
    objective = "texts and images that belong together"
    base_model_prefix = "vision_model"
    model: ClassVar[Any] = VisionTransformer
    image_options = ViT.image_options
    ignored_options = IGNORED
    ignored_keys = ("*embeddings.position_ids",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for sizes that are not a number."""
        for name in ("image_size", "patch_size"):
            if not isinstance(hub[name], int):
                raise InputError(f"config.json: {name} is {quote(hub[name])}, expected a number")


def image_numbers(mean: list[float], std: list[float]) -> tuple[Option, ...]:
    """Return the options of pixels, with their defaults."""
    numbers = {"image_mean": mean, "image_std": std}
    own = tuple(option for option in ViT.config_mapping if option.theirs in numbers)
    return with_defaults(own, numbers)


@dataclasses.dataclass(frozen=True)
class Reshaped(Converter):
    """A vector [E], ours [1, E], or a number [1], ours []."""

    def split(self, theirs: Tensor) -> tuple[Tensor]:
        """Convert [E] to [1, E], and [1] to []."""
        return (theirs.squeeze(0) if theirs.numel() == 1 else theirs.unsqueeze(0),)

    def join(self, ours: Any) -> Tensor:
        """Convert [1, E] to [E], and [] to [1]."""
        return ours[0].reshape(-1)


@register
class ClipVision(ImageTower):
    """The image encoder of CLIP: its class token, after a norm and a projection, is an image's vector."""

    model_type = "clip_vision_model"
    class_prefix = "CLIPVision"
    template: ClassVar[Any] = IMAGE
    config_mapping = (
        *with_defaults(IMAGE_OPTIONS, {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}),
        *image_numbers(CLIP_MEAN, CLIP_STD),
    )
    key_mapping: ClassVar = {
        **IMAGE_KEYS,
        "embeddings.class_embedding": Reshaped(("class_token.weight",)),
        "pre_layrnorm": "norm",
    }
    tasks: ClassVar = {
        "ModelWithProjection": Task(
            EmbedImageConfig(feature="first", normalize=False),
            {"visual_projection": "head.projection"},
            (PROJECTION,),
        ),
    }


@register
class SiglipVision(ImageTower):
    """The image encoder of SigLIP: a learned query attends to the patches."""

    model_type = "siglip_vision_model"
    class_prefix = "SiglipVision"
    paper = "Zhai et al. 2023"
    template: ClassVar[Any] = SIGLIP_IMAGE
    config_mapping = (
        *with_defaults(
            tuple(option for option in IMAGE_OPTIONS if option.theirs != "initializer_range"),
            {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
        ),
        *image_numbers([0.5], [0.5]),
    )
    required: ClassVar = {"vision_use_head": True}
    key_mapping: ClassVar = IMAGE_KEYS
    tasks: ClassVar = {
        "Model": Task(
            EmbedAttendedConfig(normalize=False),
            {
                "{base}head.probe": Unsqueezed(("head.probe.weight",)),
                **{
                    f"{{base}}head.attention.in_proj_{kind}": Fused(
                        tuple(f"head.{name}.{kind}" for name in ("query", "key", "value"))
                    )
                    for kind in ("weight", "bias")
                },
                "{base}head.attention.out_proj": "head.output",
                "{base}head.layernorm": "head.pool_norm",
                "{base}head.mlp.fc[1|2]": "head.pool_feedforward.[up|down]",
            },
            (
                option("num_attention_heads", 12, "pool_heads"),
                option("intermediate_size", 3072, "pool_size"),
                *(
                    dataclasses.replace(entry, ours=("pool_activation",))
                    for entry in config_mapping
                    if entry.theirs == "hidden_act"
                ),
                option("layer_norm_eps", 1e-6, "pool_eps"),
            ),
            prefixed=False,
        ),
    }


class TowersFamily(Family):
    """The base class of pairs of towers, which read and write each tower by its family.

    towers: for each of our towers its configuration in files, its family, the class that computes its
    vectors, and a prefix of its tensors' names there. numbers: tensors outside of the towers.
    """

    towers: ClassVar[Mapping[str, tuple[str, Family, str, str]]]
    numbers: ClassVar[Mapping[str, str | Converter]]
    model: ClassVar[Any] = TwoTowers
    objective = "texts and images that belong together"
    config_mapping = ()
    key_mapping: ClassVar = {}
    image_options = ViT.image_options
    ignored_options = ("initializer_factor",)
    tasks: ClassVar = {"Model": Task(EmbedProjectedConfig())}

    def tower_options(self, hub: Tree, part: str) -> Tree:
        """Return the configuration of a tower in that of the whole."""
        images = {name: hub[name] for name in self.image_options if name in hub and part == "vision_config"}
        return {**(hub.get(part) or {}), **images}

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> Any:
        """Return the configuration of both towers, each with its head."""
        check_values(hub)
        towers, kept = {}, {}
        for name, (part, family, own_task, _) in self.towers.items():
            config = family.config(self.tower_options(hub, part), own_task)
            assert config.origin is not None
            kept[part] = config.origin.fields
            towers[name] = dataclasses.replace(config, origin=None)
        fields = {name: value for name, value in hub.items() if name in self.ignored_options}
        others = {name: value for name, value in hub.items() if name not in self.known}
        origin = OriginConfig(
            model_type=self.model_type,
            architecture=self.class_prefix + task,
            fields={**fields, **others, **kept},
        )
        return dataclasses.replace(self.template, **towers, **self.read_numbers(hub), origin=origin)

    @property
    def common(self) -> Any:
        """The template."""
        return self.template

    @property
    def known(self) -> set[str]:
        """The options of the whole that are read."""
        parts = {part for part, *_ in self.towers.values()}
        return {*parts, *self.other_options, *self.image_options, "model_type", "architectures"}

    def read_numbers(self, hub: Tree) -> Tree:
        """Return our options outside of the towers."""
        return {}

    def write_numbers(self, config: Any) -> Tree:
        """Return their options outside of the towers."""
        return {}

    def hub_config(self, config: Any) -> tuple[Tree, str]:
        """Return their configuration for ours; raises `InputError` for towers that they lack."""
        origin = config.origin
        kept = origin.fields if origin is not None and origin.model_type == self.model_type else {}
        hub = {**kept, "model_type": self.model_type, "architectures": [f"{self.class_prefix}Model"]}
        for name, (part, family, _, _) in self.towers.items():
            tower, _ = family.hub_config(getattr(config, name))
            hub |= {option: tower.pop(option) for option in self.image_options if option in tower}
            del tower["architectures"]
            hub[part] = {**kept.get(part, {}), **tower}
        hub |= self.write_numbers(config)
        again = self.config(hub, "Model")
        for name in ("objective", "pads_texts", "initial_scale"):
            ours, theirs = getattr(config, name), getattr(again, name)
            if ours != theirs:
                raise InputError(
                    f"format 'hub': no {quote(self.model_type)} has {name}: {quote(ours)} instead of "
                    f"{quote(theirs)}; use 'polyformer'"
                )
        return hub, "Model"

    def fits(self, config: object) -> bool:
        """Return whether the model has two towers with this objective."""
        return isinstance(config, TowersConfig) and config.objective == self.common.objective

    def task_of(self, config: Any) -> str:
        """Return the only class."""
        return "Model"

    def full_key_mapping(self, task: str) -> dict[str, str | Converter]:
        """Return the key mapping of both towers, by their names in files, and of the numbers."""
        keys = dict(self.numbers)
        for _, family, own_task, prefix in self.towers.values():
            keys |= {prefix + key: ours for key, ours in family.full_key_mapping(own_task).items()}
        return keys

    def links(self, config: Any, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links of both towers and of the numbers."""
        linked = [
            Link(theirs, Converter((ours,)) if isinstance(ours, str) else ours)
            for theirs, ours in self.numbers.items()
        ]
        for name, (_, family, own_task, prefix) in self.towers.items():
            inner = {key.removeprefix(f"{name}."): None for key in own if key.startswith(f"{name}.")}
            for link in family.links(getattr(config, name), own_task, inner):
                ours = tuple(f"{name}.{key}" for key in link.converter.ours)
                linked.append(Link(prefix + link.theirs, dataclasses.replace(link.converter, ours=ours)))
        return linked

    def ignores(self, key: str) -> bool:
        return key.endswith("embeddings.position_ids")

    def expects(self, key: str) -> bool:
        """Return whether a tensor has no weights: there are no other heads."""
        return self.ignores(key)


@register
class Clip(TowersFamily):
    """A text encoder and an image encoder, whose pairs are found by a softmax over texts and over images."""

    model_type = "clip"
    class_prefix = "CLIP"
    paper = "Radford et al. 2021"
    template: ClassVar[Any] = TowersConfig(
        text=dataclasses.replace(ClipText.template, head=EmbedProjectedConfig(projection=512)),
        image=dataclasses.replace(IMAGE, head=EmbedImageConfig(feature="first", projection=512)),
    )
    towers: ClassVar = {
        "text": ("text_config", ClipText(), "ModelWithProjection", ""),
        "image": ("vision_config", ClipVision(), "ModelWithProjection", ""),
    }
    numbers: ClassVar = {"logit_scale": "scale"}
    other_options: ClassVar = {
        **{"text_config": None, "vision_config": None, "projection_dim": 512},
        "logit_scale_init_value": 2.6592,
    }

    def tower_options(self, hub: Tree, part: str) -> Tree:
        """Return the configuration of a tower, with the common width of the vectors."""
        width = hub.get("projection_dim", 512)
        return {**super().tower_options(hub, part), "projection_dim": width}

    def read_numbers(self, hub: Tree) -> Tree:
        """Return the initial scale."""
        return {"initial_scale": hub.get("logit_scale_init_value", 2.6592)}

    def write_numbers(self, config: Any) -> Tree:
        """Return the width and the initial scale."""
        return {"projection_dim": config.width, "logit_scale_init_value": config.initial_scale}


@register
class Siglip(TowersFamily):
    """A text encoder and an image encoder, whose pairs are classified one by one."""

    model_type = "siglip"
    class_prefix = "Siglip"
    paper = "Zhai et al. 2023"
    template: ClassVar[Any] = TowersConfig(
        text=SiglipText.template,
        image=SIGLIP_IMAGE,
        objective="sigmoid",
        pads_texts=True,
    )
    towers: ClassVar = {
        "text": ("text_config", SiglipText(), "Model", "text_model."),
        "image": ("vision_config", SiglipVision(), "Model", "vision_model."),
    }
    numbers: ClassVar = {"logit_scale": Reshaped(("scale",)), "logit_bias": Reshaped(("bias",))}
    other_options: ClassVar = {"text_config": None, "vision_config": None}
