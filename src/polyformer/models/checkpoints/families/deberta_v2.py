"""DeBERTa, the second and the third version. He et al. 2021; He et al. 2023.

They may share projections of content and positions, put distances into buckets, and have a convolution over
three tokens in parallel to the first layer.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    Tree,
    activation,
    get_path,
    read_options,
    write_options,
)
from polyformer.models.checkpoints.families.deberta_common import (
    POSITION_KEYS,
    POSITION_OPTIONS,
    POSITION_QUERIES,
    SELF,
    TRUNK,
    DebertaFamily,
    options,
    positive,
)
from polyformer.models.checkpoints.families.shared_tasks import multiple_choice
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Converter, layered
from polyformer.models.presets import model_config


@dataclasses.dataclass(frozen=True)
class ZeroBias(Converter):
    """A bias that shifts all scores of a query equally; ours has none, and zeros are written."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Return no tensors: the bias does not affect the outputs."""
        return ()

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return zeros [E'] for the weights [E', E]."""
        return ours[0].new_zeros(len(ours[0]))


@dataclasses.dataclass(frozen=True)
class ConvolutionKernel(Converter):
    """The matrices of a convolution, one for each tap, in one kernel: [E, E, taps]."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split [E, E, taps] into matrices [E, E], one per tap."""
        return theirs.unbind(-1)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Join matrices [E, E], one per tap, to [E, E, taps]."""
        return torch.stack(list(ours), -1)


LAYER = {
    "attention.self.query_proj": "attention.query",
    "attention.self.key_proj": "attention.key",
    "attention.self.value_proj": "attention.value",
}
TAPS = tuple(f"encoder.convolution.taps.{i}.weight" for i in range(3))
CONVOLUTION = activation("conv_act", "tanh", "encoder.convolution.convolution_activation")


@register
class DebertaV2(DebertaFamily):
    """The second and the third version of DeBERTa, with buckets of distances and an optional convolution."""

    model_type = "deberta-v2"
    class_prefix = "DebertaV2"
    paper = "He et al. 2021; He et al. 2023 (version 3)"
    objective = "masked language modelling; replaced token detection (version 3)"
    template = model_config("deberta-v3-base")
    config_mapping = options(
        vocab_size=128100,
        hidden_size=1536,
        num_hidden_layers=24,
        num_attention_heads=24,
        intermediate_size=6144,
    )
    required: ClassVar = {"pooler_dropout": 0.0, "conv_groups": 1}
    other_options = (
        *POSITION_OPTIONS,
        "position_buckets",
        "share_att_key",
        "norm_rel_ebd",
        "conv_kernel_size",
        "conv_act",
    )
    key_mapping: ClassVar = {
        **TRUNK,
        "encoder.LayerNorm": "encoder.position.norm",
        "encoder.conv.conv.weight": ConvolutionKernel(TAPS),
        "encoder.conv.conv.bias": "encoder.convolution.taps.1.bias",
        "encoder.conv.LayerNorm": "encoder.convolution.norm",
        **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
        f"{SELF}.pos_key_proj": POSITION_KEYS,
        f"{SELF}.pos_key_proj.bias": ZeroBias((POSITION_KEYS + ".weight",)),
        f"{SELF}.pos_query_proj": POSITION_QUERIES,
    }
    tasks: ClassVar = {
        **DebertaFamily.tasks,
        "ForMultipleChoice": multiple_choice(
            "pooler.dense", None, activation("pooler_hidden_act", "gelu", "text.activation")
        ),
    }
    sizes = ("deberta-v3-small", "deberta-v3-base")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for another width of heads, other norms of the distances and other
        kernels.
        """
        super().check(hub)
        width, heads = (hub.get(name, self.default(name)) for name in ("hidden_size", "num_attention_heads"))
        size = hub.get("attention_head_size")
        if size is not None and size * heads != width:
            raise InputError(
                f"config.json: attention_head_size is {size}, and only hidden_size / num_attention_heads, "
                f"{width / heads:g}, is supported"
            )
        norm = hub.get("norm_rel_ebd", "none")
        if norm not in ("none", "layer_norm"):
            raise InputError(f"config.json: norm_rel_ebd is {quote(norm)}, expected 'none' or 'layer_norm'")
        if hub.get("conv_kernel_size", 0) not in (0, 3):
            raise InputError(f"config.json: conv_kernel_size is {hub['conv_kernel_size']}, expected 0 or 3")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the convolution too."""
        super().read_other_options(tree, hub)
        tree["encoder"]["convolution"] = None
        if hub.get("conv_kernel_size", 0):
            tree["encoder"]["convolution"] = {"convolution_activation": None}
            read_options((CONVOLUTION,), hub, tree)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the convolution too."""
        hub = super().write_other_options(tree)
        if get_path(tree, "encoder.convolution") is None:
            return {**hub, "conv_kernel_size": 0}
        return {**hub, "conv_kernel_size": 3, **write_options((CONVOLUTION,), tree)}

    def read_position_options(self, hub: Tree) -> Tree:
        """Return buckets, shared projections and the norm of the distances' vectors."""
        return {
            "buckets": positive(hub, "position_buckets"),
            "share_projections": hub.get("share_att_key", False),
            "norm_embeddings": hub.get("norm_rel_ebd", "none") == "layer_norm",
        }

    def write_position_options(self, position: Tree) -> Tree:
        """Return their options for buckets, shared projections and the norm."""
        return {
            "position_buckets": position["buckets"] or -1,
            "share_att_key": position["share_projections"],
            "norm_rel_ebd": "layer_norm" if position["norm_embeddings"] else "none",
        }
