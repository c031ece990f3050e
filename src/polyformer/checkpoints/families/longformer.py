"""Longformer: RoBERTa with windows, and global tokens with projections of their own. Beltagy et al. 2020."""

import dataclasses
from typing import Any, ClassVar

from polyformer.checkpoints.families.bert import EMBEDDINGS, FIELDS, LAYER
from polyformer.checkpoints.family import PROBLEM, Family, Task, register
from polyformer.checkpoints.fields import Tree, field, look_up, put
from polyformer.checkpoints.names import layered
from polyformer.core.errors import InputError, quote
from polyformer.heads import ClassifyConfig, EmbedConfig, MaskedConfig, SpanConfig, TagConfig
from polyformer.patterns import Marked, Or, Pattern, PerLayer, Window
from polyformer.presets import model_config

GLOBAL = {
    f"attention.self.{one}_global": f"attention.global_attention.{one}" for one in ("query", "key", "value")
}
HEAD = {
    "lm_head.dense": "head.dense",
    "lm_head.layer_norm": "head.norm",
    "lm_head.bias": "head.bias",
    "lm_head.decoder": "head",
}
COPIES = {
    "lm_head.decoder.weight": "longformer.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
POOLED = {"classifier.dense": "head.dense", "classifier.out_proj": "head.output"}
DEFAULTS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
PATTERN = "encoder.attention.mechanism.pattern"
POSITIONS = "max_position_embeddings"


@register
class Longformer(Family):
    """The encoder. Rows of the table of positions up to the padding's are none's, as in RoBERTa."""

    model_type = "longformer"
    classes = "Longformer"
    paper = "Beltagy et al. 2020"
    objective = "masked language modelling"
    base = "longformer"
    template = model_config("longformer-base")
    fields = tuple(
        dataclasses.replace(one, default=DEFAULTS.get(one.theirs, one.default))
        for one in FIELDS
        if one.theirs != POSITIONS
    )
    adjusted = (POSITIONS, "attention_window")
    inert = ("onnx_export", "sep_token_id")
    names: ClassVar = {
        **{f"embeddings.{theirs}": ours for theirs, ours in EMBEDDINGS.items()},
        **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER | GLOBAL),
    }
    ignored = ("*embeddings.position_ids",)
    dropouts = ("hidden_dropout_prob",)
    tasks: ClassVar = {
        "Model": Task(
            EmbedConfig(pooling="first", hidden=True, normalize=False),
            {"{base}pooler.dense": "head.dense"},
            base=False,
        ),
        "ForMaskedLM": Task(MaskedConfig(), HEAD, (field("layer_norm_eps", 1e-12, "eps"),), COPIES),
        "ForSequenceClassification": Task(
            ClassifyConfig(drops_twice=True, marks_first=True), POOLED, (PROBLEM,)
        ),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, (field("sep_token_id", 2, "separator"),)
        ),
    }
    sizes = ("longformer-base",)

    def adjust(self, tree: Tree, hub: Tree) -> None:
        layers = tree["encoder"]["num_hidden_layers"]
        put(tree, PATTERN, windowed(hub.get("attention_window", 512), layers).to_text())
        first = _first(tree)
        tree["encoder"]["position"]["offset"] = first
        tree[POSITIONS] = hub.get(POSITIONS, 512) - first
        if tree[POSITIONS] < 1:
            raise InputError(
                f"config.json: {POSITIONS} is {hub.get(POSITIONS)}, and the first {first} are none"
            )

    def describe(self, tree: Tree) -> Tree:
        layers = look_up(tree, "encoder.num_hidden_layers") or 0
        windows = [_window(look_up(tree, PATTERN), layer) for layer in range(layers)]
        return {POSITIONS: tree[POSITIONS] + _first(tree), "attention_window": windows}


def windowed(given: Any, layers: int) -> Pattern:
    """What each layer sees: as many tokens on each side as half of its window, and the marked ones."""
    windows = [given] * layers if isinstance(given, int) else list(given)
    if len(windows) != layers or any(one < 2 or one % 2 for one in windows):
        raise InputError(
            f"config.json: attention_window is {quote(given)}, expected an even number of 2 or more, "
            f"or one for each of the {layers} layers"
        )
    patterns = [Window(one // 2) | Marked() for one in windows]
    return patterns[0] if len(set(windows)) == 1 else PerLayer(tuple(patterns))


def _window(text: str | None, layer: int) -> int:
    """The window of a layer; 0, which no checkpoint has, for another pattern."""
    pattern = None if text is None else Pattern.from_text(text).at(layer)
    near = pattern.left if isinstance(pattern, Or) else None
    return 2 * near.before if isinstance(near, Window) else 0


def _first(tree: Tree) -> int:
    """The row of the first position."""
    pad = look_up(tree, "special.pad")
    return 0 if pad is None else pad + 1
