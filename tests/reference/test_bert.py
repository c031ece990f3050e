"""The bert-base preset, in tiny sizes and with every head, is transformers' BERT with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.heads import ClassifyConfig, HeadConfig, SpanConfig, TagConfig
from polyformer.model import Transformer
from polyformer.presets import model_config

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 23, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 20, "max_position_embeddings": 19}  # fmt: skip
LAYER = {"attention.self.query": "attention.query", "attention.self.key": "attention.key",
         "attention.self.value": "attention.value", "attention.output.dense": "attention.output",
         "attention.output.LayerNorm": "block.norms.0", "intermediate.dense": "feedforward.up",
         "output.dense": "feedforward.down", "output.LayerNorm": "block.norms.1"}  # fmt: skip
HEADS = {
    "BertForMaskedLM": {"cls.predictions.transform.dense": "head.dense",
                        "cls.predictions.transform.LayerNorm": "head.norm", "cls.predictions": "head"},
    "BertForSequenceClassification": {"bert.pooler.dense": "head.dense", "classifier": "head.output"},
    "BertForTokenClassification": {"classifier": "head.output"},
    "BertForQuestionAnswering": {"qa_outputs": "head.output"},
}  # fmt: skip


def ours_from_theirs(theirs: dict[str, Tensor], head: dict[str, str]) -> dict[str, Tensor]:
    """Weights, or their gradients, under our names."""
    names = {"bert.embeddings.word_embeddings": "tokens",
             "bert.embeddings.LayerNorm": "encoder_embedding.norm",
             "bert.embeddings.position_embeddings": "encoder.position.tables.0",
             "bert.embeddings.token_type_embeddings": "encoder_embedding.types", **head}  # fmt: skip
    for i in range(SIZES["num_hidden_layers"]):
        names |= {f"bert.encoder.layer.{i}.{old}": f"encoder.layers.{i}.{new}" for old, new in LAYER.items()}
    found = {}
    for old, new in names.items():
        for kind in ("weight", "bias"):
            if f"{old}.{kind}" in theirs:
                found[f"{new}.{kind}"] = theirs[f"{old}.{kind}"]
    return found


def pair(name: str, head: HeadConfig | None, **options: Any) -> tuple[Transformer, torch.nn.Module]:
    """Ours and theirs, in float64, with weights that are all away from zero and one."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, attn_implementation="eager", pad_token_id=None, **options)
    theirs = getattr(transformers, name)(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    wanted: dict[str, Any] = dict(SIZES) if head is None else {**SIZES, "head": head}
    ours = Transformer(model_config("bert-base", wanted)).double().eval()
    ours.load_state_dict(ours_from_theirs(dict(theirs.state_dict()), HEADS[name]))
    return ours, theirs


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def batch() -> dict[str, Tensor]:
    """Three rows of different lengths, of two token types each."""
    torch.manual_seed(1)
    mask = (torch.arange(11) < torch.tensor([[11], [8], [3]])).long()
    types = (torch.arange(11) >= torch.tensor([[4], [9], [1]])).long()
    return {"input_ids": torch.randint(23, (3, 11)), "attention_mask": mask, "token_type_ids": types}


def compare(ours: Transformer, theirs: torch.nn.Module, inputs: dict[str, Tensor], labels: dict[str, Tensor],
            head: dict[str, str]) -> tuple[Any, Any]:  # fmt: skip
    """Loss, hidden states, attentions at the real tokens and all gradients agree; returns both outputs."""
    real = inputs["attention_mask"].bool()
    mine = ours(**inputs, **labels, output_hidden_states=True, output_attentions=True)
    if "labels" in labels and labels["labels"].shape == (3, 2) and "qa_outputs" in head:
        labels = {"start_positions": labels["labels"][:, 0], "end_positions": labels["labels"][:, 1]}
    other = theirs(**inputs, **labels, output_hidden_states=True, output_attentions=True)
    same(mine.loss, other.loss)
    assert len(mine.hidden_states) == len(other.hidden_states) == 3
    for a, b in zip(mine.hidden_states, other.hidden_states):
        same(a[real], b[real])
    for a, b in zip(mine.attentions, other.attentions):
        same(a.transpose(1, 2)[real], b.transpose(1, 2)[real])
    mine.loss.backward()
    other.loss.backward()
    gradients = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    expected = ours_from_theirs(gradients, head)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        same(parameter.grad, expected[name])
    return mine, other


def test_masked_language_model():
    ours, theirs = pair("BertForMaskedLM", None)
    inputs = batch()
    labels = torch.full((3, 11), -100)
    labels[0, 3], labels[1, 0], labels[2, 2] = 5, 22, 0
    mine, other = compare(ours, theirs, inputs, {"labels": labels}, HEADS["BertForMaskedLM"])
    real = inputs["attention_mask"].bool()
    same(mine.logits[real], other.logits[real])


def test_sequence_classification():
    ours, theirs = pair("BertForSequenceClassification", ClassifyConfig(num_labels=3), num_labels=3)
    labels = {"labels": torch.tensor([2, 0, 1])}
    mine, other = compare(ours, theirs, batch(), labels, HEADS["BertForSequenceClassification"])
    same(mine.logits, other.logits)


def test_token_classification():
    ours, theirs = pair("BertForTokenClassification", TagConfig(num_labels=4), num_labels=4)
    inputs = batch()
    labels = torch.randint(4, (3, 11)).masked_fill(inputs["attention_mask"] == 0, -100)
    mine, other = compare(ours, theirs, inputs, {"labels": labels}, HEADS["BertForTokenClassification"])
    real = inputs["attention_mask"].bool()
    same(mine.logits[real], other.logits[real])


def test_question_answering():
    """Full rows: theirs lets an answer point at padding, ours does not."""
    ours, theirs = pair("BertForQuestionAnswering", SpanConfig())
    inputs = batch()
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    labels = {"labels": torch.tensor([[0, 3], [4, 4], [2, 10]])}
    mine, other = compare(ours, theirs, inputs, labels, HEADS["BertForQuestionAnswering"])
    same(mine.logits, torch.stack([other.start_logits, other.end_logits], -1))
