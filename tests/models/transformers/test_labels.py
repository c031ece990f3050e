"""Labels, sizes and configurations of wrapped models, as transformers' tools read and change them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from twins import V, texts, transformers, twins

import polyformer
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer
from polyformer.models import transformers as hub
from polyformer.models.presets import create_model

NAMES: dict[str, Any] = {
    "id2label": {0: "neg", 1: "pos", 2: "mixed"},
    "label2id": {"neg": 0, "pos": 1, "mixed": 2},
}
TEXTS = [f"line {i} of a small text" for i in range(60)]


def test_pipelines_name_the_labels(tmp_path: Path):
    build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=V), TEXTS).save(tmp_path)
    for problem, function in (
        ("multi_label_classification", torch.sigmoid),
        ("regression", lambda x: x),
        ("single_label_classification", lambda x: x.softmax(-1)),
    ):
        ours, theirs = twins(
            "bert", "ForSequenceClassification", torch.float32, problem_type=problem, vocab_size=64, **NAMES
        )
        ours.save_pretrained(tmp_path)
        judge = transformers.pipeline("text-classification", model=str(tmp_path), top_k=None)
        rows = judge(TEXTS[3])
        scores = {row["label"]: row["score"] for row in (rows[0] if isinstance(rows[0], list) else rows)}
        ids = judge.tokenizer(TEXTS[3], return_tensors="pt")["input_ids"]
        expected = function(theirs(ids).logits[0]).tolist()
        assert scores == pytest.approx(dict(zip(NAMES["label2id"], expected)), abs=1e-5)


@pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
@pytest.mark.parametrize("family", ["bert", "deberta", "deberta-v2"])
def test_losses_of_soft_labels(family: str, problem: str | None):
    ours, theirs = twins(family, "ForSequenceClassification", problem_type=problem)
    labels = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    actual, expected = (model(texts(), labels=labels) for model in (ours, theirs))
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=1e-6)
    actual.loss.backward()
    assert ours.get_input_embeddings().weight.grad.any()


NUMBERS = torch.tensor([0.3, 1.2])
TARGETS: dict[str, tuple[int, torch.Tensor]] = {
    "numbers [B]": (1, NUMBERS),
    "numbers [B, 1]": (1, NUMBERS.unsqueeze(-1)),
    "classes [B]": (3, torch.tensor([2, 0])),
    "several [B, 3]": (3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
}


@pytest.mark.parametrize("family", ["bert", "deberta", "deberta-v2", "gpt2", "bart", "t5", "xlm"])
def test_losses_without_a_problem_type(family: str):
    ids = texts(2)
    ids[:, -1] = 1 if family in ("t5", "xlm") else 2
    for name, (count, labels) in TARGETS.items():
        ours, theirs = twins(family, "ForSequenceClassification", torch.float32, num_labels=count)
        actual, expected = (model(ids, labels=labels).loss.item() for model in (ours, theirs))
        assert actual == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)])
def test_shares_of_other_shapes_are_refused(shape: tuple[int, ...]):
    ours, _ = twins("deberta-v2", "ForSequenceClassification", num_labels=3)
    with pytest.raises(InputError, match=r"labels: expected the shape \(2, 3\)"):
        ours(texts(2), labels=torch.ones(shape))


def test_another_number_of_labels(tmp_path: Path):
    ours, _ = twins("bert", "ForSequenceClassification", torch.float32, **NAMES)
    ours.save_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    assert auto.from_pretrained(tmp_path).config.label2id == NAMES["label2id"]
    again = auto.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert again(texts()).logits.shape == (3, 5)
    again.save_pretrained(tmp_path / "again")
    assert auto.from_pretrained(tmp_path / "again")(texts()).logits.shape == (3, 5)


@pytest.mark.parametrize(
    ("family", "task"),
    [("gpt2", "LMHeadModel"), ("bert", "ForMaskedLM"), ("bart", "ForConditionalGeneration")],
)
def test_more_tokens(family: str, task: str, tmp_path: Path):
    ours, _ = twins(family, task, torch.float32)
    more = {"decoder_input_ids": texts()} if ours.config.is_encoder_decoder else {}
    expected = ours(texts(), **more).logits
    ours.resize_token_embeddings(V + 7)
    assert ours.config.vocab_size == ours.model.config.vocab_size == V + 7
    torch.testing.assert_close(ours(texts(), **more).logits[..., :V], expected)
    assert ours(texts() + 7, **more).logits.shape == (3, 24, V + 7)
    ours.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path)
    assert torch.equal(again(texts() + 7, **more).logits, ours(texts() + 7, **more).logits)
    assert polyformer.from_pretrained(tmp_path).config.vocab_size == V + 7
    ours.resize_token_embeddings(V)
    torch.testing.assert_close(ours(texts(), **more).logits, expected)


SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}


@pytest.mark.parametrize("family", ["bert", "gpt2", "distilbert"])
def test_sizes_are_named_as_theirs(family: str):
    ours, theirs = twins(family, "Model")
    for name in SIZES:
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert not ours.can_generate()
    assert hub.PolyformerForCausalLM.can_generate()


def test_answers_outside_the_text_count_for_nothing():
    ours, theirs = twins("bert", "ForQuestionAnswering")
    places = {"start_positions": torch.tensor([3, 99, 5]), "end_positions": torch.tensor([[7], [2], [24]])}
    actual, expected = (model(texts(), **places) for model in (ours, theirs))
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.parametrize("ids", [texts(), texts().masked_fill(torch.arange(24) > 15, 0)])
def test_a_causal_classifier_reads_the_last_real_token(ids: torch.Tensor):
    ours, theirs = twins("gpt2", "ForSequenceClassification")
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)


def test_trajectories(tmp_path: Path):
    ours, theirs = twins("decision_transformer", "Model")
    generator = torch.Generator().manual_seed(0)
    sizes = {"states": 3, "actions": 2, "rewards": 1, "returns_to_go": 1}
    steps = {
        name: torch.randn(2, 5, size, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
    }
    inputs = {**steps, "timesteps": torch.arange(10).view(2, 5), "output_hidden_states": True}
    actual, expected = ours(**inputs), theirs(**inputs)
    for name in ("state_preds", "action_preds", "return_preds"):
        torch.testing.assert_close(actual[name], expected[name])
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(**inputs).action_preds, actual.action_preds)


def test_a_model_of_no_family_is_sent_to_the_wrapper(tmp_path: Path):
    inner = create_model(
        "decoder-tiny", num_hidden_layers=1, hidden_size=16, mechanism="performer", position="sinusoidal"
    )
    with pytest.raises(InputError, match=r"polyformer.models.transformers.wrap\(model\).save_pretrained"):
        inner.save_pretrained(tmp_path, format="hub")
