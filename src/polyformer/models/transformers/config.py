"""The configuration of a wrapped model: ours as plain data, and the attributes for transformers' tools."""

from typing import Any, ClassVar, Literal

import transformers

from polyformer.core.errors import InputError
from polyformer.models.architectures import TrajectoryConfig
from polyformer.models.architectures.pretrained import known_labels
from polyformer.models.config import ModelConfig

# Our names for the kinds of labels, and the names in transformers.
PROBLEMS = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}

# The option that identifies a `TrajectoryConfig`.
TRAJECTORY = "max_timesteps"

Tree = dict[str, Any]


class PolyformerConfig(transformers.PreTrainedConfig):
    """The configuration of a wrapped model: `polyformer` is a `ModelConfig` or `TrajectoryConfig` as plain
    data.

    All sizes come from `polyformer`. The other arguments that change the model are `vocab_size`, `num_labels`
    (or `id2label`) and `problem_type`. `training_record` and `license` appear in the model's card
    (`polyformer.models.architectures.model_card`).
    """

    model_type = "polyformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "encoder_last_hidden_state",
        "encoder_hidden_states",
        "encoder_attentions",
    ]
    polyformer: dict[str, Any] | None = None
    training_record: dict[str, Any] | None = None
    license: str | None = None
    use_cache: bool = True
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = None

    def __post_init__(self, **options: Any) -> None:
        tree = self.polyformer or {}
        special = tree.get("special", {})
        for role in ("pad", "bos", "eos"):
            options.setdefault(f"{role}_token_id", special.get(role))
        head = tree.get("head", {})
        if "num_labels" in head and self.id2label is None:
            options.setdefault("num_labels", head["num_labels"])
        if self.problem_type is None:
            self.problem_type = PROBLEMS.get(head.get("problem"))  # type: ignore[assignment]
        self.is_encoder_decoder = all(tree.get(side) for side in ("encoder", "decoder"))
        # Tools read sizes here, but cannot change them.
        both = {**options, **hub_attributes(tree)}
        if self.is_encoder_decoder:
            both["decoder_start_token_id"] = special.get("bos")
        start = both.pop("decoder_start_token_id", None)
        super().__post_init__(**both)
        if start is not None:  # the base class accepts the generation settings of old files and drops them
            self.decoder_start_token_id = start

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: saved files name the package's class, and contain no copy of its source."""

    def resolve(self) -> ModelConfig | TrajectoryConfig:
        """Return our configuration, with the arguments that change it."""
        if self.polyformer is None:
            raise InputError(
                "polyformer: expected the model's configuration, got None; "
                "use polyformer.models.transformers.wrap"
            )
        if TRAJECTORY in self.polyformer:
            return TrajectoryConfig.from_dict(self.polyformer)
        head = dict(self.polyformer["head"])
        if "num_labels" in head:
            head["num_labels"] = self.num_labels
        if self.problem_type is not None and head.get("problem", "") in (None, *PROBLEMS):
            head["problem"] = next(ours for ours, theirs in PROBLEMS.items() if theirs == self.problem_type)
        return ModelConfig.from_dict({**self.polyformer, "head": head, "vocab_size": self.vocab_size})

    def transformer(self) -> ModelConfig:
        """Return our configuration, for a model that reads tokens."""
        resolve = self.resolve()
        assert isinstance(resolve, ModelConfig)
        return resolve


def hub_attributes(tree: Tree) -> Tree:
    """Return the attributes that transformers' tools read from a configuration, by their names."""
    if not tree:
        return {"vocab_size": 0}
    stack = tree.get("decoder") or tree["encoder"]
    attention = stack["attention"]
    heads = attention["num_attention_heads"]
    fields = {
        "hidden_size": tree["hidden_size"],
        "num_hidden_layers": stack["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": attention["num_key_value_heads"] or heads,
        "head_dim": attention["head_size"] or tree["hidden_size"] // heads,
        "intermediate_size": stack["feedforward"].get("intermediate_size"),
        "max_position_embeddings": tree["max_position_embeddings"],
        "initializer_range": tree["initializer_range"] or 0.02,
    }
    if TRAJECTORY in tree:
        return fields | {"state_dim": tree["head"]["state_size"], "act_dim": tree["head"]["action_size"]}
    embedding = tree["embedding"]
    fields |= {
        "vocab_size": tree["vocab_size"],
        "type_vocab_size": embedding["type_vocab_size"],
        "tie_word_embeddings": embedding["tied"],
    }
    if tree.get("encoder") and tree.get("decoder"):
        fields["encoder_layers"] = tree["encoder"]["num_hidden_layers"]
        fields["decoder_layers"] = tree["decoder"]["num_hidden_layers"]
    return fields


def config_of(model: Any) -> PolyformerConfig:
    """Return the configuration for our `model`, with the label names of its checkpoint."""
    tree, known, names = model.config.to_dict(), {}, known_labels(model)
    if names:
        numbers = {name: number for number, name in enumerate(names)}
        known = {"id2label": dict(enumerate(names)), "label2id": numbers}
    record = None if model.record is None else model.record.to_dict()
    return PolyformerConfig(polyformer=tree, training_record=record, **known)
