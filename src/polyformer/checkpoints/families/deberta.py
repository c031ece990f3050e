"""DeBERTa: BERT's layers with disentangled positions. He et al. 2021; its later versions He et al. 2023.

The first version holds queries, keys and values head by head in one matrix, and its keys have no bias.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.families.bert import COPIES, FIELDS, MASKED
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Field, Tree, act, field, look_up, read_fields, write_fields
from polyformer.checkpoints.names import Link, Part, layered
from polyformer.core.errors import InputError, quote
from polyformer.heads import ClassifyConfig, EmbedConfig, MaskedConfig, SpanConfig, TagConfig
from polyformer.position import DebertaConfig, LearnedConfig, NoPositionConfig
from polyformer.presets import model_config


@dataclasses.dataclass(frozen=True)
class Interleaved(Part):
    """Query, key and value of each head in turn: [H, 3 D, E]."""

    heads: int = 1

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        parts = theirs.unflatten(0, (self.heads, len(self.ours), -1))
        return [one.flatten(0, 1) for one in parts.unbind(1)]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return torch.stack([one.unflatten(0, (self.heads, -1)) for one in ours], 1).flatten(0, 2)


@dataclasses.dataclass(frozen=True)
class WithoutEffect(Part):
    """A bias of theirs that moves all scores of a query alike, so that we have none: written as zeros."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return ()

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].new_zeros(len(ours[0]))


@dataclasses.dataclass(frozen=True)
class Taps(Part):
    """A matrix for each of the neighbouring tokens, side by side: [E, E, taps]."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return theirs.unbind(-1)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(ours), -1)


LAYER = {
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "block.norms.0",
    "intermediate.dense": "feedforward.up",
    "output.dense": "feedforward.down",
    "output.LayerNorm": "block.norms.1",
}
FIRST = {
    "attention.self.in_proj": Interleaved(("attention.query", "attention.key", "attention.value")),
    "attention.self.q_bias": "attention.query.bias",
    "attention.self.v_bias": "attention.value.bias",
}
LATER = {
    "attention.self.query_proj": "attention.query",
    "attention.self.key_proj": "attention.key",
    "attention.self.value_proj": "attention.value",
}
TRUNK = {
    "embeddings.word_embeddings": "tokens",
    "embeddings.token_type_embeddings": "encoder_embedding.types",
    "embeddings.LayerNorm": "encoder_embedding.norm",
    "encoder.rel_embeddings": "encoder.position.table",
    **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
}
SELF, KEYS = "encoder.layer.{i}.attention.self", "encoder.position.keys.{i}"
QUERIES = "encoder.position.queries.{i}"
ABSOLUTE = "embeddings.position_embeddings"
NEW_HEAD = {
    "lm_predictions.lm_head.dense": "head.dense",
    "lm_predictions.lm_head.LayerNorm": "head.norm",
    "lm_predictions.lm_head.bias": "head.bias",
}
"""The masked language model's tensors without `legacy`; it always reads the token table."""

MASKED_FIELDS = (act("hidden_act", "gelu", "activation"), field("layer_norm_eps", 1e-7, "eps"))
COPIED = {name: one.replace("bert.", "deberta.", 1) for name, one in COPIES.items()}
POOLED = {"pooler.dense": "head.dense", "classifier": "head.output"}
TASKS = {
    "Model": Task(EmbedConfig(pooling="first", normalize=False), base=False),
    "ForMaskedLM": Task(MaskedConfig(), {**MASKED, **NEW_HEAD}, MASKED_FIELDS, COPIED),
    "ForSequenceClassification": Task(
        ClassifyConfig(), POOLED, (act("pooler_hidden_act", "gelu", "activation"),)
    ),
    "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}),
    "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}),
}
OWN = (
    "relative_attention",
    "max_relative_positions",
    "position_biased_input",
    "pos_att_type",
    "pooler_hidden_size",
)


CONVOLUTION = act("conv_act", "tanh", "encoder.convolution.convolution_activation")


def fields(**defaults: Any) -> tuple[Field, ...]:
    """BERT's options with the defaults of a version."""
    defaults |= {"type_vocab_size": 0, "layer_norm_eps": 1e-7}
    return tuple(dataclasses.replace(one, default=defaults.get(one.theirs, one.default)) for one in FIELDS)


class DebertaFamily(Family):
    """What the versions have in common."""

    objective = "masked language modelling"
    base = "deberta"
    fixed: ClassVar = {"pooler_dropout": 0.0, "talking_head": False}
    inert = ("legacy",)
    ignored = ("*embeddings.position_ids", "*position_embeddings.weight", "mask_predictions.*")
    dropouts = ("cls_dropout", "hidden_dropout_prob")
    tasks = TASKS

    def check(self, hub: Tree) -> None:
        width = hub.get("hidden_size", self.default("hidden_size"))
        for name in ("embedding_size", "pooler_hidden_size"):
            if hub.get(name, width) != width:
                raise InputError(
                    f"config.json: {name} is {quote(hub[name])}, and only hidden_size {width} is supported"
                )
        terms = _terms(hub)
        if bool(terms) != bool(hub.get("relative_attention")) or set(terms) - {"c2p", "p2c"}:
            raise InputError(
                f"config.json: pos_att_type is {terms}, expected 'c2p', 'p2c' or both where "
                f"relative_attention is true, and none where it is false"
            )

    def adjust(self, tree: Tree, hub: Tree) -> None:
        absolute = hub.get("position_biased_input", True)
        position = LearnedConfig() if absolute else NoPositionConfig()
        if _terms(hub):
            position = DebertaConfig(
                max_relative_positions=_positive(hub, "max_relative_positions"),
                terms=_terms(hub),
                eps=hub.get("layer_norm_eps", 1e-7),
                dropout=hub.get("hidden_dropout_prob", 0.1),
                absolute=absolute,
                **self.more(hub),
            )
        tree["encoder"]["position"] = position.to_dict()
        if tree["head"]["kind"] == "masked" and not hub.get("legacy", True):
            tree["embedding"]["tied"] = True

    def describe(self, tree: Tree) -> Tree:
        position = look_up(tree, "encoder.position") or {}
        relative = position.get("kind") == "deberta"
        found = {"relative_attention": relative, "position_biased_input": position.get("kind") == "learned"}
        if not relative:
            return found
        reach = position["max_relative_positions"]
        return {
            "relative_attention": True,
            "position_biased_input": position["absolute"],
            "pos_att_type": position["terms"],
            "max_relative_positions": -1 if reach is None else reach,
            **self.describe_more(position),
        }

    def more(self, hub: Tree) -> Tree:
        """What a version adds to the position scheme."""
        return {}

    def describe_more(self, position: Tree) -> Tree:
        """The reverse."""
        return {}

    def default(self, name: str) -> Any:
        return next(one.default for one in self.fields if one.theirs == name)

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        assert config.encoder is not None
        origin = config.origin
        new = origin is not None and not origin.fields.get("legacy", True)
        found = []
        for link in super().links(config, task, own):
            if link.theirs.startswith("cls." if new else "lm_predictions."):
                continue
            if isinstance(link.part, Interleaved):
                part = dataclasses.replace(link.part, heads=config.encoder.attention.num_attention_heads)
                link = dataclasses.replace(link, part=part)
            found.append(link)
        return found

    def _read_labels(self, task: Task, hub: Tree, head: Tree) -> None:
        super()._read_labels(task, hub, head)
        if head["kind"] == "tag":
            head["dropout"] = hub.get("hidden_dropout_prob", 0.1)


@register
class Deberta(DebertaFamily):
    """The first version."""

    model_type = "deberta"
    classes = "Deberta"
    paper = "He et al. 2021"
    template = model_config("deberta-base")
    fields = fields(vocab_size=50265)
    adjusted = OWN
    names: ClassVar = {
        **TRUNK,
        ABSOLUTE: "encoder.position.absolute",
        ABSOLUTE + ".weight": "encoder.position.tables.0.weight",
        **layered("encoder.layer.{i}", "encoder.layers.{i}", FIRST),
        f"{SELF}.pos_proj": KEYS,
        f"{SELF}.pos_q_proj": QUERIES,
    }
    sizes = ("deberta-base",)


@register
class DebertaV2(DebertaFamily):
    """The second and the third version."""

    model_type = "deberta-v2"
    classes = "DebertaV2"
    paper = "He et al. 2021; He et al. 2023 (version 3)"
    objective = "masked language modelling; replaced token detection (version 3)"
    template = model_config("deberta-v3-base")
    fields = fields(
        vocab_size=128100,
        hidden_size=1536,
        num_hidden_layers=24,
        num_attention_heads=24,
        intermediate_size=6144,
    )
    fixed: ClassVar = {"pooler_dropout": 0.0, "conv_groups": 1}
    adjusted = (*OWN, "position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size", "conv_act")
    names: ClassVar = {
        **TRUNK,
        ABSOLUTE: "encoder.position.absolute",
        ABSOLUTE + ".weight": "encoder.position.tables.0.weight",
        "encoder.LayerNorm": "encoder.position.norm",
        "encoder.conv.conv.weight": Taps(tuple(f"encoder.convolution.taps.{i}.weight" for i in range(3))),
        "encoder.conv.conv.bias": "encoder.convolution.taps.1.bias",
        "encoder.conv.LayerNorm": "encoder.convolution.norm",
        **layered("encoder.layer.{i}", "encoder.layers.{i}", LATER),
        f"{SELF}.pos_key_proj": KEYS,
        f"{SELF}.pos_key_proj.bias": WithoutEffect((KEYS + ".weight",)),
        f"{SELF}.pos_query_proj": QUERIES,
    }
    sizes = ("deberta-v3-small", "deberta-v3-base")

    def check(self, hub: Tree) -> None:
        super().check(hub)
        width, heads = (hub.get(one, self.default(one)) for one in ("hidden_size", "num_attention_heads"))
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

    def adjust(self, tree: Tree, hub: Tree) -> None:
        super().adjust(tree, hub)
        tree["encoder"]["convolution"] = None
        if hub.get("conv_kernel_size", 0):
            tree["encoder"]["convolution"] = {"convolution_activation": None}
            read_fields((CONVOLUTION,), hub, tree)

    def describe(self, tree: Tree) -> Tree:
        found = super().describe(tree)
        if look_up(tree, "encoder.convolution") is None:
            return {**found, "conv_kernel_size": 0}
        return {**found, "conv_kernel_size": 3, **write_fields((CONVOLUTION,), tree)}

    def more(self, hub: Tree) -> Tree:
        return {
            "buckets": _positive(hub, "position_buckets"),
            "share_projections": hub.get("share_att_key", False),
            "norm_embeddings": hub.get("norm_rel_ebd", "none") == "layer_norm",
        }

    def describe_more(self, position: Tree) -> Tree:
        return {
            "position_buckets": position["buckets"] or -1,
            "share_att_key": position["share_projections"],
            "norm_rel_ebd": "layer_norm" if position["norm_embeddings"] else "none",
        }


def _terms(hub: Tree) -> tuple[str, ...]:
    """The terms that `pos_att_type` names, as a list or as "c2p|p2c", in our order."""
    given = hub.get("pos_att_type") or ()
    names = [one.strip() for one in given.lower().split("|")] if isinstance(given, str) else given
    return tuple(sorted(names))


def _positive(hub: Tree, name: str) -> int | None:
    """A number of which those below 1 mean none."""
    given = hub.get(name, -1)
    return given if given > 0 else None
