"""All versions of DeBERTa with every head, loaded from transformers' files and saved back.

Theirs takes the root of the head's width, and in the first version every norm and two biases, in float32
whatever the model's type; here they are replaced by the same in that type.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyformer
from polyformer.checkpoints import FAMILIES
from polyformer.core.errors import InputError
from polyformer.model import Transformer
from polyformer.presets import model_config

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")
v1 = pytest.importorskip("transformers.models.deberta.modeling_deberta")
v2 = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")

from families import counted, same, shaken, texts, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 19,
    "problem_type": "single_label_classification",
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "c2p|p2c",
}
BOTH: list[dict[str, Any]] = [
    {"max_relative_positions": 4, "type_vocab_size": 2, "pooler_hidden_act": "tanh", "pos_att_type": ["p2c"]},
    {"position_biased_input": True, "hidden_act": "gelu_new", "tie_word_embeddings": False},
    {"relative_attention": False, "pos_att_type": None, "position_biased_input": True, "pad_token_id": 2},
    {"relative_attention": False, "pos_att_type": None, "num_hidden_layers": 3},
]
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "Deberta": [{}, {"pos_att_type": ["c2p"], "layer_norm_eps": 1e-5}, *BOTH],
    "DebertaV2": [
        {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        {"position_buckets": 6, "max_relative_positions": 17, "type_vocab_size": 2},
        {"share_att_key": True, "pos_att_type": ["c2p"], "num_attention_heads": 2},
        {"conv_kernel_size": 3, "conv_act": "gelu", "position_buckets": 4, "share_att_key": True},
        *BOTH,
    ],
}
TOKENS = torch.full((3, 11), -100)
TOKENS[0, 3], TOKENS[1, 0], TOKENS[2, 2] = 5, 22, 0
HEADS: dict[str, Any] = {
    "Model": ({}, None),
    "ForMaskedLM": ({}, {"labels": TOKENS}),
    "ForSequenceClassification": ({"num_labels": 3}, {"labels": torch.tensor([2, 0, 1])}),
    "ForTokenClassification": ({"num_labels": 4}, {"labels": TOKENS.clamp_max(3)}),
    "ForQuestionAnswering": ({}, None),
}
CASES = [
    (version, config, head, side)
    for version, configs in CONFIGS.items()
    for config in range(len(configs))
    for head, side in ((item, "right") for item in HEADS)
] + [(version, config, "ForMaskedLM", "left") for version in CONFIGS for config in range(4)]


class Norm(torch.nn.LayerNorm):
    """The first version's, in the type of its input."""

    def __init__(self, size: int, eps: float = 1e-12):
        super().__init__(size, eps=eps)


def root(layer: Tensor, factor: int) -> Tensor:
    return torch.tensor(layer.size(-1) * factor, dtype=torch.float64).sqrt()


class Attention(v1.DisentangledSelfAttention):  # type: ignore[misc, name-defined]
    """The first version's, with biases in the type of all else."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.q_bias = torch.nn.Parameter(torch.zeros(config.hidden_size))
        self.v_bias = torch.nn.Parameter(torch.zeros(config.hidden_size))


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1, "DebertaLayerNorm", Norm)
    monkeypatch.setattr(v1, "DisentangledSelfAttention", Attention)
    for module in (v1, v2):
        monkeypatch.setattr(module, "scaled_size_sqrt", root)


def config_of(version: str, **options: Any) -> Any:
    return getattr(transformers, f"{version}Config")(**{**SIZES, **options})


@pytest.mark.parametrize(("version", "config", "head", "side"), CASES)
def test_deberta(version: str, config: int, head: str, side: str, tmp_path: Path):
    options, labels = HEADS[head]
    chosen = config_of(version, **CONFIGS[version][config], **options)
    inputs = texts(23, pad=chosen.pad_token_id, side=side)
    if chosen.type_vocab_size:
        inputs["token_type_ids"] = (torch.arange(11) % 3 == 1).long().expand(3, -1)
    if labels is not None and labels["labels"].dim() == 2:
        labels = {"labels": labels["labels"].masked_fill(inputs["attention_mask"] == 0, -100)}
    untied = head == "ForMaskedLM" and not chosen.tie_word_embeddings
    verify(
        getattr(transformers, version + head)(chosen),
        inputs,
        tmp_path,
        labels=labels,
        only_theirs={"position_ids": counted(inputs["attention_mask"])},
        dead=(*without_effect(chosen), *(["cls.predictions.bias"] if untied else [])),
    )


def without_effect(config: Any) -> tuple[str, ...]:
    """Biases of positions as keys, which move all scores of a query alike: saved as zeros."""
    layers = range(config.num_hidden_layers)
    names = [f"encoder.layer.{i}.attention.self.pos_key_proj.bias" for i in layers]
    return (*names, *(f"deberta.{name}" for name in names))


@pytest.mark.parametrize("version", list(CONFIGS))
@pytest.mark.parametrize("tied", [True, False])
def test_the_masked_head_of_the_original_code(version: str, tied: bool, tmp_path: Path):
    """Without `legacy` it reads the token table, tied or not."""
    chosen = config_of(version, legacy=False, tie_word_embeddings=tied)
    labels = {"labels": TOKENS.masked_fill(texts(23)["attention_mask"] == 0, -100)}
    ours = verify(
        getattr(transformers, f"{version}ForMaskedLM")(chosen),
        texts(23),
        tmp_path,
        labels=labels,
        dead=without_effect(chosen),
    )
    assert ours.config.embedding.tied


def test_answers_lose_as_theirs(tmp_path: Path):
    model = transformers.DebertaForQuestionAnswering(config_of("Deberta"))
    first, last = torch.tensor([1, 0, 4]), torch.tensor([2, 10, 4])
    verify(
        model,
        texts(23, (11, 11, 11)),
        tmp_path,
        labels={"labels": torch.stack([first, last], 1)},
        their_labels={"start_positions": first, "end_positions": last},
    )


@pytest.mark.parametrize("version", list(CONFIGS))
def test_attention_weights(version: str, tmp_path: Path):
    chosen = config_of(version, max_relative_positions=7, attn_implementation="eager")
    theirs: Any = shaken(getattr(transformers, f"{version}Model")(chosen))
    theirs.save_pretrained(tmp_path)
    ours, inputs = polyformer.from_pretrained(tmp_path), texts(23)
    real = inputs["attention_mask"].bool()
    mine, other = (item(**inputs, output_attentions=True).attentions for item in (ours, theirs))
    for a, b in zip(mine, other, strict=True):
        same(a.transpose(1, 2)[real], b.transpose(1, 2)[real])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Deberta", {"talking_head": True}, "talking_head"),
    ("Deberta", {"pooler_dropout": 0.3}, "pooler_dropout"),
    ("Deberta", {"embedding_size": 6}, "embedding_size"),
    ("Deberta", {"pos_att_type": ["p2p"]}, "pos_att_type"),
    ("Deberta", {"relative_attention": False}, "pos_att_type"),
    ("DebertaV2", {"attention_head_size": 6}, "attention_head_size"),
    ("DebertaV2", {"conv_kernel_size": 5}, "conv_kernel_size"),
    ("DebertaV2", {"conv_groups": 2}, "conv_groups"),
    ("DebertaV2", {"norm_rel_ebd": "other"}, "norm_rel_ebd"),
]


@pytest.mark.parametrize(("version", "options", "name"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(version: str, options: dict[str, Any], name: str):
    hub = config_of(version, **options).to_dict()
    with pytest.raises(InputError, match=name):
        FAMILIES[hub["model_type"]].config(hub, "Model")


def size(model: torch.nn.Module, without: str = "") -> int:
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not without or without not in name
    )


@pytest.mark.parametrize(
    ("preset", "version", "options", "published"),
    [
        ("deberta-base", "Deberta", {}, 100),
        ("deberta-v3-base", "DebertaV2", {}, 86),
        ("deberta-v3-small", "DebertaV2", {"num_hidden_layers": 6}, 44),
    ],
)
def test_parameters_of_the_published_sizes(
    preset: str, version: str, options: dict[str, Any], published: int
):
    """As many as theirs; without the token table as many millions as the papers' tables say."""
    later = (
        {}
        if version == "Deberta"
        else {
            "position_buckets": 256,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "hidden_size": 768,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "intermediate_size": 3072,
        }
    )
    wanted = {**later, **options, "relative_attention": True, "position_biased_input": False}
    config = getattr(transformers, f"{version}Config")(**wanted, pos_att_type=["c2p", "p2c"])
    with torch.device("meta"):
        ours = Transformer(model_config(preset))
        theirs = getattr(transformers, f"{version}ForMaskedLM")(config)
        trunk = getattr(transformers, f"{version}Model")(config)
    assert size(ours) == size(theirs)
    assert abs(size(trunk, without="word_embeddings") / 1e6 - published) < 1.1


def test_parameters_of_the_second_version():
    """microsoft/deberta-v2-xlarge, with a convolution: 0.9 thousand million."""
    hub = {
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "position_buckets": 256,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": -1,
    }
    with torch.device("meta"):
        theirs = transformers.DebertaV2Model(transformers.DebertaV2Config(**hub))
        ours = Transformer(FAMILIES["deberta-v2"].config(hub, "Model"))
    assert size(ours) == size(theirs)
    assert abs(size(ours) / 1e9 - 0.9) < 0.02
