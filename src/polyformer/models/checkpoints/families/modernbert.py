"""ModernBERT: windows between layers of full attention, each with its base. Warner et al. 2024."""

from typing import ClassVar

from polyformer.attention.patterns import Window
from polyformer.models.checkpoints.config_mapping import (
    Option,
    Tree,
    activation,
    choice,
    flag,
    get_path,
    option,
)
from polyformer.models.checkpoints.families.common import FIRST_TOKEN
from polyformer.models.checkpoints.families.layers import (
    FULL,
    KINDS,
    LOCAL,
    check_kinds,
    get_patterns,
    read_base,
    set_bases,
    set_patterns,
    write_bases,
)
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Fused, layered
from polyformer.models.checkpoints.values import options, special
from polyformer.models.presets import model_config
from polyformer.nn.heads import (
    ChooseConfig,
    ClassifyConfig,
    MaskedConfig,
    SpanConfig,
    TagConfig,
    TransformConfig,
)

# The name of the rotary base in older files, and its default, for each kind of layer.
THETAS = {FULL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}

LAYER = {
    "attn_norm": "block.norms.0",
    "attn.Wqkv": Fused(("attention.query", "attention.key", "attention.value")),
    "attn.Wo": "attention.output",
    "mlp_norm": "block.norms.1",
    "mlp.Wi": Fused(("feedforward.gate", "feedforward.up")),
    "mlp.Wo": "feedforward.down",
}


def head_options(prefix: str, dense_bias: str = "dense_bias") -> tuple[Option, ...]:
    """Return the options of the layer before a head's last layer."""
    return (
        flag("classifier_bias", f"{prefix}{dense_bias}"),
        activation("classifier_activation", "gelu", f"{prefix}activation"),
        option("norm_eps", 1e-5, f"{prefix}eps"),
        flag("norm_bias", f"{prefix}norm_bias"),
    )


TRANSFORM = {"head.[dense|norm]": "head.transform.[dense|norm]"}
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
    config_mapping: ClassVar = options(
        "encoder",
        {"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22},
        {"num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192},
        {"initializer_range": 0.02, "norm_eps": 1e-5, "embedding_dropout": 0.0, "mlp_dropout": 0.0},
        flag("norm_bias", "encoder.norm.bias"),
        flag("attention_bias", "encoder.attention.bias"),
        flag("mlp_bias", "encoder.feedforward.bias"),
        special(50283, 50281, 50282),
    )
    required: ClassVar = {"attention_dropout": 0.0}  # also the layer's output dropout in transformers
    other_options: ClassVar = {
        **{"layer_types": None, "global_attn_every_n_layers": 3, "local_attention": 128},
        **{"rope_parameters": None, "rope_scaling": None},
        **dict(THETAS.values()),
    }
    ignored_options = (
        *("cls_token_id", "sep_token_id", "initializer_cutoff_factor", "deterministic_flash_attn"),
        *("sparse_prediction", "sparse_pred_ignore_index", "classifier_pooling", "use_cache"),
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
            {"head.[dense|norm]": "head.[dense|norm]", "decoder": "head"},
            (*head_options(""), flag("decoder_bias", "bias", default=True)),
            tied_keys={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        ),
        "Model": FIRST_TOKEN,
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
        """Raise `InputError` for other kinds of layers, a wrong number, and extended rotary positions."""
        check_kinds("layer_types", _kinds(hub), KINDS, "num_hidden_layers", hub)
        for kind in KINDS:
            read_base(hub, kind, THETAS)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the window and the base of every layer."""
        kinds, reach = _kinds(hub), hub["local_attention"] // 2
        set_patterns(tree, "encoder", [Window(reach, reach) if kind == LOCAL else None for kind in kinds])
        set_bases(tree["encoder"]["position"], hub, kinds, THETAS)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the window and the base of every layer."""
        windows = get_patterns(tree, "encoder") or []
        kinds = [FULL if window is None else LOCAL for window in windows]
        ropes = write_bases(get_path(tree, "encoder.position") or {}, kinds)
        # Half of the window on each side.
        reach = next((window.before for window in windows if window is not None), 64)
        return {"layer_types": kinds, **ropes, "local_attention": max(2 * reach, 1)}


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from transformers' list, or from older options."""
    if hub["layer_types"] is not None:
        return hub["layer_types"]
    every, layers = hub["global_attn_every_n_layers"], hub["num_hidden_layers"]
    return [LOCAL if layer % every else FULL for layer in range(layers)]
