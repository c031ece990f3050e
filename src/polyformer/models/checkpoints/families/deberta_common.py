"""The common tables of all versions of DeBERTa: BERT's layers with disentangled positions. He et al. 2021."""

from collections.abc import Mapping
from typing import Any, ClassVar

from polyformer.attention.positions import DebertaConfig, LearnedConfig, NoPositionConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    Option,
    Tree,
    activation,
    get_path,
    option,
    with_defaults,
)
from polyformer.models.checkpoints.families.bert import COPIES, MASKED, OPTIONS
from polyformer.models.checkpoints.families.shared_tasks import QUESTION_ANSWERING, TOKEN_CLASSIFICATION
from polyformer.models.checkpoints.family import Family, Task
from polyformer.models.checkpoints.key_mapping import Link, layered
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import ClassifyConfig, EmbedConfig, MaskedConfig

LAYER = {
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "block.norms.0",
    "intermediate.dense": "feedforward.up",
    "output.dense": "feedforward.down",
    "output.LayerNorm": "block.norms.1",
}
TRUNK = {
    "embeddings.word_embeddings": "tokens",
    "embeddings.position_embeddings": "encoder.position.absolute",
    "embeddings.position_embeddings.weight": "encoder.position.tables.0.weight",
    "embeddings.token_type_embeddings": "encoder_embedding.types",
    "embeddings.LayerNorm": "encoder_embedding.norm",
    "encoder.rel_embeddings": "encoder.position.table",
    **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
}
SELF = "encoder.layer.{i}.attention.self"
POSITION_KEYS, POSITION_QUERIES = "encoder.position.keys.{i}", "encoder.position.queries.{i}"

NEW_HEAD = {
    "lm_predictions.lm_head.dense": "head.dense",
    "lm_predictions.lm_head.LayerNorm": "head.norm",
    "lm_predictions.lm_head.bias": "head.bias",
}
"""The masked language model's tensors without `legacy`; it is always tied to the token table."""

MASKED_OPTIONS = (activation("hidden_act", "gelu", "activation"), option("layer_norm_eps", 1e-7, "eps"))
TIED_KEYS = {key: source.replace("bert.", "deberta.", 1) for key, source in COPIES.items()}
POOLED = {"pooler.dense": "head.dense", "classifier": "head.output"}
TASKS = {
    "Model": Task(EmbedConfig(pooling="first", normalize=False), prefixed=False),
    "ForMaskedLM": Task(MaskedConfig(), {**MASKED, **NEW_HEAD}, MASKED_OPTIONS, TIED_KEYS),
    "ForSequenceClassification": Task(
        ClassifyConfig(), POOLED, (activation("pooler_hidden_act", "gelu", "activation"),)
    ),
    "ForTokenClassification": TOKEN_CLASSIFICATION,
    "ForQuestionAnswering": QUESTION_ANSWERING,
}
POSITION_OPTIONS = (
    "relative_attention",
    "max_relative_positions",
    "position_biased_input",
    "pos_att_type",
    "pooler_hidden_size",
)


def options(**defaults: Any) -> tuple[Option, ...]:
    """Return BERT's options with the defaults of a version."""
    return with_defaults(OPTIONS, {"type_vocab_size": 0, "layer_norm_eps": 1e-7, **defaults})


class DebertaFamily(Family):
    """The base class of all versions; a version adds its options of positions and its projections."""

    objective = "masked language modelling"
    base_model_prefix = "deberta"
    required: ClassVar = {"pooler_dropout": 0.0, "talking_head": False}
    ignored_options = ("legacy",)
    ignored_keys = ("*embeddings.position_ids", "*position_embeddings.weight", "mask_predictions.*")
    head_dropouts = ("cls_dropout", "hidden_dropout_prob")
    tasks = TASKS

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for embeddings and poolers of another width, and for terms that do not go with
        `relative_attention`.
        """
        width = hub.get("hidden_size", self.default("hidden_size"))
        for name in ("embedding_size", "pooler_hidden_size"):
            if hub.get(name, width) != width:
                raise InputError(
                    f"config.json: {name} is {quote(hub[name])}, and only hidden_size {width} is supported"
                )
        terms = _terms(hub)
        if bool(terms) != bool(hub.get("relative_attention")) or set(terms) - {"c2p", "p2c"}:
            raise InputError(
                f"config.json: pos_att_type is {terms}, expected 'c2p', 'p2c' or both if "
                f"relative_attention is true, and none if it is false"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the position scheme; without `legacy` the masked head is always tied to the token table."""
        absolute = hub.get("position_biased_input", True)
        position = LearnedConfig() if absolute else NoPositionConfig()
        if _terms(hub):
            position = DebertaConfig(
                max_relative_positions=positive(hub, "max_relative_positions"),
                terms=_terms(hub),
                eps=hub.get("layer_norm_eps", 1e-7),
                dropout=hub.get("hidden_dropout_prob", 0.1),
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

    def default(self, name: str) -> Any:
        """Return the value of an option of the config mapping if `hub` has none."""
        return next(option.default for option in self.config_mapping if option.theirs == name)

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links as for every family, with the tensors of the masked head that `legacy` selects."""
        origin = config.origin
        new = origin is not None and not origin.fields.get("legacy", True)
        other = "cls." if new else "lm_predictions."
        return [link for link in super().links(config, task, own) if not link.theirs.startswith(other)]

    def _read_labels(self, task: Task, hub: Tree, head: Tree) -> None:
        super()._read_labels(task, hub, head)
        if head["kind"] == "tag":
            head["dropout"] = hub.get("hidden_dropout_prob", 0.1)


def positive(hub: Tree, name: str) -> int | None:
    """Return an option's number; None below 1, which disables it."""
    number = hub.get(name, -1)
    return number if number > 0 else None


def _terms(hub: Tree) -> tuple[str, ...]:
    """Return the terms in `pos_att_type`, a list or text such as "c2p|p2c", in our order."""
    terms = hub.get("pos_att_type") or ()
    names = [name.strip() for name in terms.lower().split("|")] if isinstance(terms, str) else terms
    return tuple(sorted(names))
