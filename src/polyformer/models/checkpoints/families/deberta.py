"""DeBERTa, versions 1 to 3: BERT's layers with disentangled positions. He et al. 2021; He et al. 2023.

The first version has queries, keys and values head by head in one matrix, and its keys have no bias. The
later versions may share projections of content and positions, put distances into buckets, and have a
convolution over three tokens in parallel to the first layer.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.positions import DebertaConfig, LearnedConfig, NoPositionConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    Tree,
    activation,
    check_same,
    get_path,
    read_options,
    with_defaults,
    write_options,
)
from polyformer.models.checkpoints.families import bert
from polyformer.models.checkpoints.families.common import (
    FIRST_TOKEN,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    multiple_choice,
)
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Interleaved, layered
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, MaskedConfig

LAYER = {theirs: ours for theirs, ours in bert.LAYER.items() if ".self." not in theirs}
TRUNK = {
    "embeddings.word_embeddings": "tokens",
    # with relative attention the absolute positions are added before the vocabulary, or nowhere
    "embeddings.position_embeddings": "encoder.position.absolute",
    "embeddings.position_embeddings.weight": "encoder.position.tables.0.weight",
    "embeddings.token_type_embeddings": "encoder_embedding.types",
    "embeddings.LayerNorm": "encoder_embedding.norm",
    "encoder.rel_embeddings": "encoder.position.table",
    **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
}
SELF = "encoder.layer.{i}.attention.self"
POSITION_KEYS, POSITION_QUERIES = "encoder.position.keys.{i}", "encoder.position.queries.{i}"

# The masked language model without `legacy`; it is always tied to the token table.
NEW_HEAD = {
    "lm_predictions.lm_head.[dense|LayerNorm]": "head.[dense|norm]",
    "lm_predictions.lm_head.bias": "head.bias",
}
TIED_KEYS = {key: source.replace("bert.", "deberta.", 1) for key, source in bert.COPIES.items()}
TASKS = {
    "Model": FIRST_TOKEN,
    "ForMaskedLM": Task(
        MaskedConfig(), {**bert.MASKED, **NEW_HEAD}, bert.transform_options(eps=1e-7), TIED_KEYS
    ),
    "ForSequenceClassification": Task(
        ClassifyConfig(),
        {"pooler.dense": "head.dense", "classifier": "head.output"},
        (activation("pooler_hidden_act", "gelu", "activation"),),
    ),
    "ForTokenClassification": TOKEN_CLASSIFICATION,
    "ForQuestionAnswering": QUESTION_ANSWERING,
}
POSITION_OPTIONS: Tree = {
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_biased_input": True,
    "pos_att_type": None,
    "pooler_hidden_size": None,
}
OPTIONS = with_defaults(bert.OPTIONS, {"type_vocab_size": 0, "layer_norm_eps": 1e-7})
TAPS = tuple(f"encoder.convolution.taps.{i}.weight" for i in range(3))
CONVOLUTION = activation("conv_act", "tanh", "encoder.convolution.convolution_activation")


def heads(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return the heads of a model, and the rows of queries, keys and values."""
    assert config.encoder is not None
    return config.encoder.attention.num_attention_heads, (config.hidden_size,) * 3


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


class DebertaFamily(Family):
    """The base class of all versions; a version adds its options of positions and its projections."""

    objective = "masked language modelling"
    base_model_prefix = "deberta"
    required: ClassVar = {"pooler_dropout": 0.0, "talking_head": False}
    ignored_options = ("legacy",)
    ignored_keys = ("*embeddings.position_ids", "*position_embeddings.weight", "mask_predictions.*")
    head_dropouts = ("cls_dropout", "hidden_dropout_prob")
    other_options: ClassVar = POSITION_OPTIONS
    tasks = TASKS

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for parts of another width, and for terms without `relative_attention`."""
        for name in ("embedding_size", "pooler_hidden_size"):
            check_same(name, "hidden_size", hub)
        terms = _terms(hub)
        if bool(terms) != bool(hub["relative_attention"]) or set(terms) - {"c2p", "p2c"}:
            raise InputError(
                f"config.json: pos_att_type is {terms}, expected 'c2p', 'p2c' or both if "
                f"relative_attention is true, and none if it is false"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the position scheme; without `legacy` the masked head is always tied to the token table."""
        absolute = hub["position_biased_input"]
        position = LearnedConfig() if absolute else NoPositionConfig()
        if _terms(hub):
            position = DebertaConfig(
                max_relative_positions=positive(hub, "max_relative_positions"),
                terms=_terms(hub),
                eps=hub["layer_norm_eps"],
                dropout=hub["hidden_dropout_prob"],
                absolute=absolute,
                **self.read_position_options(hub),
            )
        tree["encoder"]["position"] = position.to_dict()
        if tree["head"]["kind"] == "masked" and not hub.get("legacy", True):
            tree["embedding"]["tied"] = True

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the position scheme."""
        position = get_path(tree, "encoder.position") or {}
        if position.get("kind") != "deberta":
            return {
                "relative_attention": False,
                "position_biased_input": position.get("kind") == "learned",
            }
        distance = position["max_relative_positions"]
        return {
            "relative_attention": True,
            "position_biased_input": position["absolute"],
            "pos_att_type": position["terms"],
            "max_relative_positions": -1 if distance is None else distance,
            **self.write_position_options(position),
        }

    def read_position_options(self, hub: Tree) -> Tree:
        """Return the options of our position scheme that a version adds."""
        return {}

    def write_position_options(self, position: Tree) -> Tree:
        """Return the options of their configuration that a version adds."""
        return {}

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether a tensor is of the masked head that `legacy` selects."""
        origin = config.origin
        new = origin is not None and not origin.fields.get("legacy", True)
        return not theirs.startswith("cls." if new else "lm_predictions.")

    def _read_labels(self, task: Task, hub: Tree, head: Tree) -> None:
        super()._read_labels(task, hub, head)
        if head["kind"] == "tag":  # transformers gives this class no option of its own
            head["dropout"] = hub.get("hidden_dropout_prob", 0.1)


def positive(hub: Tree, name: str) -> int | None:
    """Return an option's number; None below 1 and for null, which disable it."""
    number = hub[name]
    return number if number is not None and number > 0 else None


def _terms(hub: Tree) -> tuple[str, ...]:
    """Return the terms in `pos_att_type`, a list or text such as "c2p|p2c", in our order."""
    terms = hub["pos_att_type"] or ()
    names = [name.strip() for name in terms.lower().split("|")] if isinstance(terms, str) else terms
    # Content to position, then position to content: their order has no effect.
    return tuple(sorted(names))


@register
class Deberta(DebertaFamily):
    """The first version of DeBERTa, with interleaved projections of queries, keys and values."""

    model_type = "deberta"
    class_prefix = "Deberta"
    paper = "He et al. 2021"
    template = model_config("deberta-base")
    config_mapping = with_defaults(OPTIONS, {"vocab_size": 50265})
    key_mapping: ClassVar = {
        **TRUNK,
        f"{SELF}.in_proj": Interleaved(
            tuple(f"encoder.layers.{{i}}.attention.{name}" for name in ("query", "key", "value")), heads
        ),
        f"{SELF}.[q|v]_bias": "encoder.layers.{i}.attention.[query|value].bias",
        f"{SELF}.pos_proj": POSITION_KEYS,
        f"{SELF}.pos_q_proj": POSITION_QUERIES,
    }
    sizes = ("deberta-base",)


@register
class DebertaV2(DebertaFamily):
    """The second and the third version of DeBERTa, with buckets of distances and an optional convolution."""

    model_type = "deberta-v2"
    class_prefix = "DebertaV2"
    paper = "He et al. 2021; He et al. 2023 (version 3)"
    objective = "masked language modelling; replaced token detection (version 3)"
    template = model_config("deberta-v3-base")
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 128100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24}
        | {"intermediate_size": 6144},
    )
    required: ClassVar = {"pooler_dropout": 0.0, "conv_groups": 1}
    other_options: ClassVar = {
        **POSITION_OPTIONS,
        **{"position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none"},
        **{"conv_kernel_size": 0, "conv_act": "tanh"},
    }
    key_mapping: ClassVar = {
        **TRUNK,
        "encoder.LayerNorm": "encoder.position.norm",
        "encoder.conv.conv.weight": ConvolutionKernel(TAPS),
        "encoder.conv.conv.bias": "encoder.convolution.taps.1.bias",
        "encoder.conv.LayerNorm": "encoder.convolution.norm",
        f"{SELF}.[query|key|value]_proj": "encoder.layers.{i}.attention.[query|key|value]",
        f"{SELF}.pos_key_proj": POSITION_KEYS,
        f"{SELF}.pos_key_proj.bias": ZeroBias((POSITION_KEYS + ".weight",)),
        f"{SELF}.pos_query_proj": POSITION_QUERIES,
    }
    tasks: ClassVar = {
        **TASKS,
        "ForMultipleChoice": multiple_choice(
            "pooler.dense", None, activation("pooler_hidden_act", "gelu", "text.activation")
        ),
    }
    sizes = ("deberta-v3-small", "deberta-v3-base")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for other widths of heads, norms of distances, and kernels."""
        super().check(hub)
        width, heads, size = hub["hidden_size"], hub["num_attention_heads"], hub.get("attention_head_size")
        if size is not None and size * heads != width:
            raise InputError(
                f"config.json: attention_head_size is {size}, and only hidden_size / num_attention_heads, "
                f"{width / heads:g}, is supported"
            )
        norm = hub["norm_rel_ebd"]
        if norm not in ("none", "layer_norm"):
            raise InputError(f"config.json: norm_rel_ebd is {quote(norm)}, expected 'none' or 'layer_norm'")
        if hub["conv_kernel_size"] not in (0, 3):
            raise InputError(f"config.json: conv_kernel_size is {hub['conv_kernel_size']}, expected 0 or 3")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the convolution too."""
        super().read_other_options(tree, hub)
        tree["encoder"]["convolution"] = None
        if hub["conv_kernel_size"]:
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
            "share_projections": hub["share_att_key"],
            "norm_embeddings": hub["norm_rel_ebd"] == "layer_norm",
        }

    def write_position_options(self, position: Tree) -> Tree:
        """Return their options for buckets, shared projections and the norm."""
        return {
            "position_buckets": position["buckets"] or -1,
            "share_att_key": position["share_projections"],
            "norm_rel_ebd": "layer_norm" if position["norm_embeddings"] else "none",
        }
