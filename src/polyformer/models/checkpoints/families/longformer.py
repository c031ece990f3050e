"""Longformer: RoBERTa with windows, and global tokens with separate projections. Beltagy et al. 2020."""

from typing import Any, ClassVar

from polyformer.attention.patterns import Marked, Or, Pattern, PerLayer, Window
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    PROBLEM,
    Tree,
    get_path,
    option,
    set_path,
    with_defaults,
)
from polyformer.models.checkpoints.families.bert import EMBEDDINGS, LAYER, OPTIONS, POOLER
from polyformer.models.checkpoints.families.roberta import CLASSIFIER, LM_HEAD, tied_keys
from polyformer.models.checkpoints.families.shared_tasks import TOKEN_CLASSIFICATION, multiple_choice
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, EmbedConfig, MaskedConfig, SpanConfig

GLOBAL = {
    f"attention.self.{name}_global": f"attention.global_attention.{name}"
    for name in ("query", "key", "value")
}
DEFAULTS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
PATTERN = "encoder.attention.mechanism.pattern"
POSITIONS = "max_position_embeddings"


@register
class Longformer(Family):
    """An encoder with windows and global tokens; positions start at row pad + 1, as in RoBERTa."""

    model_type = "longformer"
    class_prefix = "Longformer"
    paper = "Beltagy et al. 2020"
    objective = "masked language modelling"
    base_model_prefix = "longformer"
    template = model_config("longformer-base")
    config_mapping = with_defaults(OPTIONS, DEFAULTS, POSITIONS)
    other_options = (POSITIONS, "attention_window")
    ignored_options = ("onnx_export", "sep_token_id")
    key_mapping: ClassVar = {
        **{f"embeddings.{theirs}": ours for theirs, ours in EMBEDDINGS.items()},
        **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER | GLOBAL),
    }
    ignored_keys = ("*embeddings.position_ids",)
    head_dropouts = ("hidden_dropout_prob",)
    tasks: ClassVar = {
        "Model": Task(
            EmbedConfig(pooling="first", hidden=True, normalize=False),
            POOLER,
            prefixed=False,
        ),
        "ForMaskedLM": Task(
            MaskedConfig(), LM_HEAD, (option("layer_norm_eps", 1e-12, "eps"),), tied_keys("longformer")
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(drops_twice=True, marks_first=True), CLASSIFIER, (PROBLEM,)
        ),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, (option("sep_token_id", 2, "separator"),)
        ),
        "ForMultipleChoice": multiple_choice(
            "{base}pooler.dense", None, option("sep_token_id", 2, "separator")
        ),
    }
    sizes = ("longformer-base",)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern, and the row of the first position."""
        layers = tree["encoder"]["num_hidden_layers"]
        set_path(tree, PATTERN, window_pattern(hub.get("attention_window", 512), layers).to_text())
        first = _first(tree)
        tree["encoder"]["position"]["offset"] = first
        tree[POSITIONS] = hub.get(POSITIONS, 512) - first
        if tree[POSITIONS] < 1:
            raise InputError(
                f"config.json: {POSITIONS} is {hub.get(POSITIONS)}, but the first {first} rows are unused"
            )

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the rows of the table of positions, and each layer's window."""
        layers = get_path(tree, "encoder.num_hidden_layers") or 0
        windows = [_window(get_path(tree, PATTERN), layer) for layer in range(layers)]
        return {POSITIONS: tree[POSITIONS] + _first(tree), "attention_window": windows}


def window_pattern(attention_window: Any, layers: int) -> Pattern:
    """Return the pattern: each layer attends to half of its window on each side, and to the marked tokens."""
    windows = [attention_window] * layers if isinstance(attention_window, int) else list(attention_window)
    if len(windows) != layers or any(size < 2 or size % 2 for size in windows):
        raise InputError(
            f"config.json: attention_window is {quote(attention_window)}, expected an even number of 2 or "
            f"more, or one for each of the {layers} layers"
        )
    patterns = [Window(size // 2) | Marked() for size in windows]
    return patterns[0] if len(set(windows)) == 1 else PerLayer(tuple(patterns))


def _window(text: str | None, layer: int) -> int:
    """Return the window of a layer; 0, which no checkpoint has, for another pattern."""
    pattern = None if text is None else Pattern.from_text(text).layer_pattern(layer)
    window = pattern.left if isinstance(pattern, Or) else None
    return 2 * window.before if isinstance(window, Window) else 0


def _first(tree: Tree) -> int:
    """Return the row of the first position."""
    pad = get_path(tree, "special.pad")
    return 0 if pad is None else pad + 1
