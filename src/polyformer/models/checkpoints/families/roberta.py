"""RoBERTa and its descendants: BERT's model with positions that begin after the padding id, and other heads.

Liu et al. 2019; XLM-RoBERTa: Conneau et al. 2020; XLM-RoBERTa-XL: Goyal et al. 2021;
Longformer: Beltagy et al. 2020; CamemBERT: Martin et al. 2020; MPNet: Song et al. 2020.
ELECTRA, which has their heads too, consists of a discriminator that detects replaced tokens, and a generator
(Clark et al. 2020). Both load with any head: the discriminator's is "ForPreTraining", the generator's
"ForMaskedLM".

transformers counts positions over the ids that are not padding, and we over the tokens that are real: pass
the attention_mask if there is padding, and both are equal. `position_ids` count from 0 here, and from the
padding id + 1 in transformers.
"""

import dataclasses
from typing import Any, ClassVar

from polyformer.attention.patterns import Marked, Or, Pattern, PerLayer, Window
from polyformer.attention.positions import T5BiasConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    PROBLEM,
    Tree,
    activation,
    check_required,
    get_path,
    option,
    set_path,
    with_defaults,
)
from polyformer.models.checkpoints.families.bert import (
    EMBEDDINGS,
    LAYER,
    OPTIONS,
    TRUNK,
    BertFamily,
    as_decoder,
)
from polyformer.models.checkpoints.families.common import (
    FIRST_TOKEN,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    as_pooled,
    multiple_choice,
    pooled,
)
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, DetectConfig, MaskedConfig, SpanConfig

LM_HEAD = {
    "lm_head.dense": "head.dense",
    "lm_head.layer_norm": "head.norm",
    "lm_head.bias": "head.bias",
    "lm_head.decoder": "head",
}
CLASSIFIER = {"classifier.[dense|out_proj]": "head.[dense|output]"}
EPS = option("layer_norm_eps", 1e-12, "eps")
POSITIONS = "max_position_embeddings"


def tied_keys(prefix: str) -> dict[str, str]:
    """Return the masked head's names of the token table, with the prefix `prefix`, and of its bias."""
    return {
        "lm_head.decoder.weight": f"{prefix}.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


@register
class Roberta(BertFamily):
    """An encoder like BERT without its second objective, trained on ten times the text."""

    model_type = "roberta"
    class_prefix = "Roberta"
    paper = "Liu et al. 2019"
    objective = "masked language modelling with dynamic masking"
    base_model_prefix = "roberta"
    template = model_config("roberta-base")
    config_mapping = with_defaults(
        OPTIONS, {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}, POSITIONS
    )
    other_options: ClassVar = {POSITIONS: 512}
    key_mapping = TRUNK
    tasks: ClassVar = {
        "Model": pooled("{base}pooler.dense"),
        "ForMaskedLM": Task(MaskedConfig(), LM_HEAD, (EPS,), tied_keys("roberta")),
        # gelu is fixed in this head: hidden_act does not change it
        "ForCausalLM": as_decoder(
            LM_HEAD,
            ("lm_head.dense", "lm_head.layer_norm"),
            tied_keys("roberta"),
            option("layer_norm_eps", 1e-12, "transform.eps"),
        ),
        "ForSequenceClassification": Task(ClassifyConfig(drops_twice=True), CLASSIFIER),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": as_pooled("{base}pooler.dense"),
    }
    sizes: ClassVar = ("roberta-base", "roberta-large")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for models without a padding id, after which positions begin."""
        super().check(hub)
        if hub["pad_token_id"] is None:
            raise InputError("config.json: pad_token_id is None, and positions begin behind it; set it to 1")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the row of the first position to pad + 1 of the table."""
        first = hub["pad_token_id"] + 1
        tree["encoder"]["position"]["offset"] = first
        tree[POSITIONS] = hub[POSITIONS] - first

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the number of rows of the table: positions and the rows before them."""
        return {POSITIONS: tree[POSITIONS] + tree["encoder"]["position"].get("offset", 0)}


@register
class XlmRoberta(Roberta):
    """An encoder with RoBERTa's tensors and options, for a hundred languages with a vocabulary of 250000."""

    model_type = "xlm-roberta"
    class_prefix = "XLMRoberta"
    paper = "Conneau et al. 2020"
    objective = "masked language modelling in 100 languages"
    template = model_config("xlm-roberta-base")
    # BERT's size of the vocabulary is the default in transformers, though no published model has it
    config_mapping = with_defaults(Roberta.config_mapping, {"vocab_size": 30522})
    sizes: ClassVar = ("xlm-roberta-base", "xlm-roberta-large")


@register
class XlmRobertaXl(Roberta):
    """XLM-RoBERTa in pre-norm order, with a norm at the end of the encoder and none of the embeddings.

    Dropout follows feed-forwards here too, while transformers applies it to attention only.
    """

    model_type = "xlm-roberta-xl"
    class_prefix = "XLMRobertaXL"
    paper = "Goyal et al. 2021"
    objective = "masked language modelling in 100 languages"
    template = model_config("xlm-roberta-base").override("block", "pre").override("embedding.normed", False)
    config_mapping = with_defaults(
        Roberta.config_mapping,
        {"vocab_size": 250880, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"intermediate_size": 10240, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    )
    other_options: ClassVar = {POSITIONS: 514}
    key_mapping: ClassVar = {
        **{name: ours for name, ours in TRUNK.items() if "LayerNorm" not in name},
        **layered(
            "encoder.layer.{i}",
            "encoder.layers.{i}",
            {"attention.self_attn_layer_norm": "block.norms.0", "LayerNorm": "block.norms.1"},
        ),
        "encoder.LayerNorm": "encoder.final_norm",
    }
    tasks: ClassVar = {
        name: dataclasses.replace(
            task, config_mapping=with_defaults(task.config_mapping, {"layer_norm_eps": 1e-5})
        )
        for name, task in Roberta.tasks.items()
    }
    sizes: ClassVar = ()


@register
class Camembert(Roberta):
    """RoBERTa for French, with its own vocabulary."""

    model_type = "camembert"
    class_prefix = "Camembert"
    paper = "Martin et al. 2020"
    objective = "masked language modelling of French"
    claims = False
    config_mapping = with_defaults(Roberta.config_mapping, {"vocab_size": 30522})
    sizes: ClassVar = ()


@register
class MPNet(Roberta):
    """An encoder with learned positions, and a bias of distances that all layers share (all-mpnet-base-v2).

    transformers counts positions over the ids that are not 1, and has 32 buckets whatever the options say.
    """

    model_type = "mpnet"
    class_prefix = "MPNet"
    paper = "Song et al. 2020"
    objective = "masked and permuted language modelling"
    base_model_prefix = "mpnet"
    template = (
        model_config("roberta-base")
        .override("position", T5BiasConfig(absolute=True, offset=2))
        .override("embedding.type_vocab_size", 0)
    )
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 30527, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        *(POSITIONS, "type_vocab_size"),
    )
    required: ClassVar = {"pad_token_id": 1, "relative_attention_num_buckets": 32}
    key_mapping: ClassVar = {
        **{theirs: ours for theirs, ours in EMBEDDINGS.items() if "types" not in ours},
        "embeddings.position_embeddings": "encoder.position.absolute.tables.0",
        "encoder.relative_attention_bias": "encoder.position.table",
        **layered(
            "encoder.layer.{i}",
            "encoder.layers.{i}",
            {
                "attention.attn.[q|k|v|o]": "attention.[query|key|value|output]",
                "attention.LayerNorm": "block.norms.0",
                **{name: ours for name, ours in LAYER.items() if not name.startswith("attention.")},
            },
        ),
    }
    head_dropouts = ("hidden_dropout_prob",)
    tasks: ClassVar = {
        **{name: task for name, task in Roberta.tasks.items() if name != "ForCausalLM"},
        "ForMaskedLM": Task(MaskedConfig(), LM_HEAD, (EPS,), tied_keys("mpnet")),
    }
    sizes: ClassVar = ()

    def check(self, hub: Tree) -> None:
        """Raise no error: there are no token types."""


PATTERN = "encoder.attention.mechanism.pattern"
SEPARATOR = option("sep_token_id", 2, "separator")


@register
class Longformer(Family):
    """RoBERTa with windows, and global tokens with separate projections."""

    model_type = "longformer"
    class_prefix = "Longformer"
    paper = "Beltagy et al. 2020"
    objective = "masked language modelling"
    base_model_prefix = "longformer"
    template = model_config("longformer-base")
    config_mapping = with_defaults(
        OPTIONS, {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}, POSITIONS
    )
    other_options: ClassVar = {POSITIONS: 512, "attention_window": 512}
    ignored_options = ("onnx_export", "sep_token_id")
    key_mapping: ClassVar = {
        **TRUNK,
        **layered(
            "encoder.layer.{i}.attention",
            "encoder.layers.{i}.attention",
            {"self.[query|key|value]_global": "global_attention.[query|key|value]"},
        ),
    }
    ignored_keys = ("*embeddings.position_ids",)
    head_dropouts = ("hidden_dropout_prob",)
    tasks: ClassVar = {
        "Model": pooled("{base}pooler.dense"),
        "ForMaskedLM": Task(MaskedConfig(), LM_HEAD, (EPS,), tied_keys("longformer")),
        # the first token is global when a text is classified, the question's tokens when it is answered
        "ForSequenceClassification": Task(
            ClassifyConfig(drops_twice=True, marks_first=True), CLASSIFIER, (PROBLEM,)
        ),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}, (SEPARATOR,)),
        "ForMultipleChoice": multiple_choice("{base}pooler.dense", None, SEPARATOR),
    }
    sizes = ("longformer-base",)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern, and the row of the first position."""
        layers = tree["encoder"]["num_hidden_layers"]
        set_path(tree, PATTERN, window_pattern(hub["attention_window"], layers).to_text())
        first = _first(tree)
        tree["encoder"]["position"]["offset"] = first
        tree[POSITIONS] = hub[POSITIONS] - first
        if tree[POSITIONS] < 1:
            raise InputError(
                f"config.json: {POSITIONS} is {hub[POSITIONS]}, but the first {first} rows are unused"
            )

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the rows of the table of positions, and each layer's window."""
        layers = get_path(tree, "encoder.num_hidden_layers") or 0
        windows = [window_of(get_path(tree, PATTERN), layer) for layer in range(layers)]
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


def window_of(text: str | None, layer: int) -> int:
    """Return the window of a layer; 0, which no checkpoint has, for another pattern."""
    pattern = None if text is None else Pattern.from_text(text).layer_pattern(layer)
    window = pattern.left if isinstance(pattern, Or) else None
    return 2 * window.before if isinstance(window, Window) else 0


def _first(tree: Tree) -> int:
    """Return the row of the first position."""
    pad = get_path(tree, "special.pad")
    return 0 if pad is None else pad + 1


GENERATOR = {
    "generator_predictions.[dense|LayerNorm]": "head.[dense|norm]",
    "generator_lm_head": "head",
}
DISCRIMINATOR = {"discriminator_predictions.[dense|dense_prediction]": "head.[dense|output]"}
# The supported options of multiple choice.
SUMMARY = {"summary_type": "first", "summary_use_proj": True}

COPIES = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}


@register
class Electra(BertFamily):
    """An encoder with a matrix that widens the embedding sum if it is narrower than the layers."""

    model_type = "electra"
    class_prefix = "Electra"
    paper = "Clark et al. 2020"
    objective = "replaced-token detection, with a jointly trained generator"
    base_model_prefix = "electra"
    template = model_config("electra-small")
    config_mapping = with_defaults(
        OPTIONS, {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    )
    other_options: ClassVar = {"embedding_size": 128}
    ignored_options = ("use_cache", *SUMMARY)
    key_mapping: ClassVar = {**TRUNK, "embeddings_project": "encoder_embedding.widen"}
    tasks: ClassVar = {
        "ForPreTraining": Task(
            DetectConfig(), DISCRIMINATOR, (activation("hidden_act", "gelu", "activation"),)
        ),
        "ForMaskedLM": Task(MaskedConfig(), GENERATOR, (EPS,), COPIES),
        "Model": FIRST_TOKEN,
        "ForSequenceClassification": Task(ClassifyConfig(activation="gelu", drops_twice=True), CLASSIFIER),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": multiple_choice(
            "sequence_summary.summary",
            None,
            activation("summary_activation", "gelu", "text.activation"),
            option("summary_last_dropout", 0.1, "text.dropout"),
            labelled=False,
        ),
    }
    sizes = ("electra-small", "electra-base", "electra-large", "electra-base-generator")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the width of the embeddings if it differs; refuse other layers of a choice."""
        if tree["head"]["kind"] == "choose":
            check_required(SUMMARY, hub)
        # There is no matrix if both widths are equal.
        size = hub["embedding_size"]
        tree["embedding"]["size"] = None if size == tree["hidden_size"] else size

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the width of the embeddings."""
        return {"embedding_size": tree["embedding"]["size"] or tree["hidden_size"]}
