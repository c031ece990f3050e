"""ModernBERT: layers with windows between layers of full attention, each with its base. Warner et al.
2024.
"""

from typing import Any, ClassVar

from polyformer.attention.patterns import Window
from polyformer.attention.positions import RopeConfig
from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.checkpoints.config_mapping import Option, Tree, activation, choice, get_path, option
from polyformer.models.checkpoints.families.window_layers import get_patterns, period, set_patterns
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Fused, layered
from polyformer.models.checkpoints.rope_options import read_rope
from polyformer.models.presets import model_config
from polyformer.nn.heads import (
    ChooseConfig,
    ClassifyConfig,
    EmbedConfig,
    MaskedConfig,
    SpanConfig,
    TagConfig,
    TransformConfig,
)

FULL, LOCAL = KINDS = "full_attention", "sliding_attention"
THETAS = {FULL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
"""The name of the rotary base in older files, and its default, for each kind of layer."""

LAYER = {
    "attn_norm": "block.norms.0",
    "attn.Wqkv": Fused(("attention.query", "attention.key", "attention.value")),
    "attn.Wo": "attention.output",
    "mlp_norm": "block.norms.1",
    "mlp.Wi": Fused(("feedforward.gate", "feedforward.up")),
    "mlp.Wo": "feedforward.down",
}


def flag(theirs: str, *ours: str, default: bool = False) -> Option:
    """Return an option for biases: all or none. A partial setting of ours is written as none."""
    return Option(theirs, default, ours, write=lambda bias: bias is True)


def head_options(prefix: str, dense_bias: str = "dense_bias") -> tuple[Option, ...]:
    """Return the options of the layer before a head's last layer."""
    return (
        flag("classifier_bias", f"{prefix}{dense_bias}"),
        activation("classifier_activation", "gelu", f"{prefix}activation"),
        option("norm_eps", 1e-5, f"{prefix}eps"),
        flag("norm_bias", f"{prefix}norm_bias"),
    )


TRANSFORM = {"head.dense": "head.transform.dense", "head.norm": "head.transform.norm"}
OUTPUT = {**TRANSFORM, "classifier": "head.output"}
TRANSFORMED = head_options("transform.")
POOLING, POOLING_OF_CHOICES = (
    choice("classifier_pooling", "cls", {"cls": "first", "mean": "mean"}, path)
    for path in ("pooling", "text.pooling")
)


@register
class ModernBert(Family):
    """An encoder with windows in some layers: `layer_types` lists the layers that see `local_attention`
    tokens.

    Older files give the period of the layers with full attention instead.
    """

    model_type = "modernbert"
    class_prefix = "ModernBert"
    paper = "Warner et al. 2024"
    objective = "masked language modelling"
    base_model_prefix = "model"
    template = model_config("modernbert-base")
    config_mapping: ClassVar = (
        option("vocab_size", 50368, "vocab_size"),
        option("hidden_size", 768, "hidden_size"),
        option("intermediate_size", 1152, "encoder.feedforward.intermediate_size"),
        option("num_hidden_layers", 22, "encoder.num_hidden_layers"),
        option("num_attention_heads", 12, "encoder.attention.num_attention_heads"),
        activation("hidden_activation", "gelu", "encoder.feedforward.activation"),
        option("max_position_embeddings", 8192, "max_position_embeddings"),
        option("initializer_range", 0.02, "initializer_range"),
        option("norm_eps", 1e-5, "encoder.norm.eps"),
        flag("norm_bias", "encoder.norm.bias"),
        flag("attention_bias", "encoder.attention.bias"),
        flag("mlp_bias", "encoder.feedforward.bias"),
        option("embedding_dropout", 0.0, "embedding.embedding_dropout"),
        option("mlp_dropout", 0.0, "encoder.feedforward.inner_dropout"),
        option("pad_token_id", 50283, "special.pad"),
        option("bos_token_id", 50281, "special.bos"),
        option("eos_token_id", 50282, "special.eos"),
        option("tie_word_embeddings", True, "embedding.tied"),
    )
    required: ClassVar = {"attention_dropout": 0.0}  # also the layer's output dropout in transformers
    other_options = (
        "layer_types",
        "global_attn_every_n_layers",
        "local_attention",
        "rope_parameters",
        "rope_scaling",
        "global_rope_theta",
        "local_rope_theta",
    )
    ignored_options = (
        "cls_token_id",
        "sep_token_id",
        "initializer_cutoff_factor",
        "deterministic_flash_attn",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "classifier_pooling",
        "use_cache",
    )
    key_mapping: ClassVar = {
        "embeddings.tok_embeddings": "tokens",
        "embeddings.norm": "encoder_embedding.norm",
        **layered("layers.{i}", "encoder.layers.{i}", LAYER),
        "final_norm": "encoder.final_norm",
    }
    head_dropouts = ("classifier_dropout",)
    tasks: ClassVar = {
        "ForMaskedLM": Task(
            MaskedConfig(eps=1e-5, dense_bias=False, norm_bias=False),
            {"head.dense": "head.dense", "head.norm": "head.norm", "decoder": "head"},
            (*head_options(""), flag("decoder_bias", "bias", default=True)),
            tied_keys={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        ),
        "Model": Task(EmbedConfig(pooling="first", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(
            ClassifyConfig(hidden=False, dropout=0.0, transform=TransformConfig()),
            OUTPUT,
            (*TRANSFORMED, POOLING),
        ),
        "ForTokenClassification": Task(
            TagConfig(dropout=0.0, transform=TransformConfig()), OUTPUT, TRANSFORMED
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(transform=TransformConfig()),
            OUTPUT,
            (*TRANSFORMED, option("classifier_dropout", 0.0, "span_dropout")),
        ),
        "ForMultipleChoice": Task(
            ChooseConfig(
                text=ClassifyConfig(num_labels=1, hidden=False, dropout=0.0, transform=TransformConfig())
            ),
            {name: ours.replace("head", "head.text", 1) for name, ours in OUTPUT.items()},
            (*head_options("text.transform."), POOLING_OF_CHOICES),
        ),
    }
    sizes = ("modernbert-base", "modernbert-large")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for other kinds of layers, a wrong number of them, and extended rotary
        positions.
        """
        kinds, layers = _kinds(hub), hub.get("num_hidden_layers", 22)
        for kind in kinds:
            if kind not in KINDS:
                raise unknown("layer_types", kind, KINDS)
        if len(kinds) != layers:
            raise InputError(
                f"config.json: layer_types has {len(kinds)} layers, and num_hidden_layers {layers}"
            )
        for kind in KINDS:
            _base(hub, kind)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the window and the base of every layer."""
        kinds, reach = _kinds(hub), hub.get("local_attention", 128) // 2
        set_patterns(tree, "encoder", [Window(reach, reach) if kind == LOCAL else None for kind in kinds])
        bases = period([_base(hub, kind) for kind in kinds])
        several = {"base": RopeConfig().base, "bases": bases}
        tree["encoder"]["position"] |= several if len(bases) > 1 else {"base": bases[0], "bases": []}

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the window and the base of every layer."""
        windows = get_patterns(tree, "encoder") or []
        kinds = [FULL if window is None else LOCAL for window in windows]
        position: Any = get_path(tree, "encoder.position") or {}
        bases = position.get("bases") or [position.get("base")]
        ropes = {
            kind: {"rope_type": "default", "rope_theta": bases[kinds.index(kind) % len(bases)]}
            for kind in KINDS
            if kind in kinds
        }
        reach = next((window.before for window in windows if window is not None), 64)
        return {"layer_types": kinds, "rope_parameters": ropes, "local_attention": max(2 * reach, 1)}


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from transformers' list, or from older options."""
    if hub.get("layer_types") is not None:
        return hub["layer_types"]
    every, layers = hub.get("global_attn_every_n_layers", 3), hub.get("num_hidden_layers", 22)
    return [LOCAL if layer % every else FULL for layer in range(layers)]


def _base(hub: Tree, kind: str) -> float:
    """Return the base of a kind of layers; raises `InputError` for an extension to longer texts."""
    name, usual = THETAS[kind]
    options = (hub.get("rope_parameters") or {}).get(kind) or {}
    if not isinstance(options, dict):
        raise InputError(f"config.json: rope_parameters of {kind} is {quote(options)}, expected options")
    rope = {"rope_theta": hub.get(name, usual), **options, **(hub.get("rope_scaling") or {})}
    read = read_rope(
        {"rope_parameters": rope, "max_position_embeddings": hub.get("max_position_embeddings", 8192)}
    )
    if read["extension"] is not None:
        raise InputError(
            f"config.json: rope_type of {kind} is {quote(rope['rope_type'])}, and only 'default' is "
            "supported if each kind of layer has its own rotary positions"
        )
    return read["base"]
