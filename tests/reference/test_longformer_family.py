"""Longformer with every head, loaded from transformers' files and saved back.

Theirs casts the scores to float32 for the softmax whatever the model's type; not here.
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
from polyformer.patterns import Marked, Window
from polyformer.presets import create_model

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.longformer.modeling_longformer")

from families import Inputs, same, shaken, texts, verify  # noqa: E402

LENGTH, PAD = 13, 1
SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 22,
    "attention_window": [4, 8],
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"attention_window": 8, "type_vocab_size": 1, "tie_word_embeddings": False, "hidden_act": "gelu_new"},
    {"num_hidden_layers": 3, "attention_window": [8, 4, 8], "num_attention_heads": 2, "layer_norm_eps": 1e-5},
]
TOKENS = torch.full((3, LENGTH), -100)
TOKENS[0, 3], TOKENS[1, 0], TOKENS[2, 2] = 5, 22, 0
HEADS: dict[str, Any] = {
    "Model": ({}, None),
    "ForMaskedLM": ({}, {"labels": TOKENS}),
    "ForSequenceClassification": ({"num_labels": 3}, {"labels": torch.tensor([2, 0, 1])}),
    "ForTokenClassification": ({"num_labels": 4}, {"labels": TOKENS.clamp_max(3)}),
    "ForQuestionAnswering": ({}, None),
}
GLOBAL: dict[str, list[list[int]]] = {
    "none": [[], [], []],
    "first": [[0], [0], [0]],
    "different": [[1, 5, 12], [], [9, 10]],
    "one-row": [[], [0, 2], []],
}
CASES = [
    *((config, head, "different", "right") for config in range(len(CONFIGS)) for head in HEADS),
    *((0, "ForMaskedLM", marks, side) for marks in GLOBAL for side in ("right", "left")),
]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = modeling.nn.functional
    plain = functional.softmax

    def softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return plain(scores, dim=dim)

    fake = type("functional", (), {**vars(functional), "softmax": staticmethod(softmax)})
    monkeypatch.setattr(modeling.nn, "functional", fake)


def rows(side: str = "right", marks: str = "") -> Inputs:
    """Texts; `marks` says which tokens are global, "" nothing."""
    inputs = texts(23, (LENGTH, 9, 5), PAD, side)
    if marks:
        chosen = torch.zeros_like(inputs["input_ids"])
        for row, slots in enumerate(GLOBAL[marks]):
            chosen[row, slots] = 1
        inputs["global_attention_mask"] = chosen * inputs["attention_mask"]
    return inputs


def model_of(head: str, **options: Any) -> Any:
    return getattr(transformers, f"Longformer{head}")(transformers.LongformerConfig(**{**SIZES, **options}))


@pytest.mark.parametrize(("config", "head", "marks", "side"), CASES)
def test_longformer(config: int, head: str, marks: str, side: str, tmp_path: Path):
    """Of lengths that they pad to a multiple of the window."""
    options, labels = HEADS[head]
    inputs = rows(side, marks)
    if labels is not None and labels["labels"].dim() == 2:
        labels = {"labels": labels["labels"].masked_fill(inputs["attention_mask"] == 0, -100)}
    chosen = {**CONFIGS[config], **options}
    tied = chosen.get("tie_word_embeddings", True) or head != "ForMaskedLM"
    verify(model_of(head, **chosen), inputs, tmp_path, labels=labels, dead=() if tied else ("lm_head.bias",))


def test_a_classifier_marks_the_first_token_by_itself(tmp_path: Path):
    labels = {"labels": torch.tensor([2, 0, 1])}
    ours = verify(model_of("ForSequenceClassification", num_labels=3), rows(), tmp_path, labels=labels)
    alone = ours(**rows())
    same(alone.logits, ours(**rows(marks="first")).logits)
    assert (alone.logits - ours(**rows(marks="none")).logits).abs().max() > 1e-3


def test_questions_are_marked_up_to_their_separator(tmp_path: Path):
    """Theirs wants three separators in each row; the marks end before the first."""
    inputs = rows()
    inputs["input_ids"].masked_fill_(inputs["input_ids"] == 2, 3)
    for row, ends in enumerate([(4, 5, 12), (2, 3, 8), (1, 2, 4)]):
        inputs["input_ids"][row, list(ends)] = 2
    ours = verify(model_of("ForQuestionAnswering"), inputs, tmp_path)
    marks = (torch.arange(LENGTH) < torch.tensor([[4], [2], [1]])).long()
    same(ours(**inputs).logits, ours(**inputs, global_attention_mask=marks).logits)


def test_attention_weights_of_global_tokens(tmp_path: Path):
    """Theirs come in pieces: a window's columns, and a table of the global rows."""
    theirs: Any = shaken(model_of("Model"))
    theirs.save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    torch.manual_seed(1)
    ids, chosen = torch.randint(2, 23, (1, 16)), torch.zeros(1, 16, dtype=torch.long)
    chosen[0, [3, 7]] = 1
    mine = ours(ids, global_attention_mask=chosen, output_attentions=True).attentions
    other = theirs(input_ids=ids, global_attention_mask=chosen, output_attentions=True).global_attentions
    for a, b in zip(mine, other, strict=True):
        same(a[0, :, [3, 7]], b[0].mT)


@pytest.mark.parametrize("window", [3, [4, 5], [4], 0])
def test_windows_that_are_none_are_refused(window: Any):
    hub = {**SIZES, "attention_window": window}
    with pytest.raises(InputError, match="attention_window"):
        FAMILIES["longformer"].config(hub, "Model")


def counted(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_of_the_published_model():
    """allenai/longformer-base-4096: 50265 tokens, one type, 4098 rows of positions."""
    with torch.device("meta"):
        config = transformers.LongformerConfig(
            vocab_size=50265, max_position_embeddings=4098, type_vocab_size=1, attention_window=[512] * 12
        )
        theirs = transformers.LongformerForMaskedLM(config)
        pooled = transformers.LongformerModel(config)
        ours = create_model("longformer-base")
        trunk = Transformer(FAMILIES["longformer"].config(config.to_dict(), "Model"))
    assert counted(pooled) == counted(trunk) == 148_659_456  # what the checkpoint holds
    assert counted(ours) == counted(theirs) == 148_711_257
    assert sum(name.endswith("global_attention.query.weight") for name, _ in ours.named_parameters()) == 12


def test_a_fresh_model_becomes_a_checkpoint(tmp_path: Path):
    """With the pattern that theirs has; with another it is refused."""
    sizes = {
        name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    }
    sizes |= {"num_attention_heads": 3, "max_position_embeddings": 20, "pad": 1, "bos": 0, "eos": 2}
    ours = create_model("longformer-base", **sizes, attention=Window(3) | Marked()).eval()
    ours.save_pretrained(tmp_path, format="hub")
    theirs = transformers.LongformerForMaskedLM.from_pretrained(tmp_path).eval()
    inputs, real = rows(marks="different"), rows()["attention_mask"].bool()
    same(ours(**inputs).logits[real], theirs(**inputs).logits[real], 1e-5)
    with pytest.raises(InputError, match="no public family"):
        create_model("longformer-tiny", **sizes).save_pretrained(tmp_path, format="hub")
