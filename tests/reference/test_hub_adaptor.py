"""A polyformer as one of transformers' models: Auto classes, pipelines, the Trainer and PEFT, all real."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

import polyformer  # noqa: E402
from polyformer.attention.patterns import Global, Window  # noqa: E402
from polyformer.data import TokenizerConfig  # noqa: E402
from polyformer.data.tokenizers import build_tokenizer  # noqa: E402
from polyformer.models import transformers as hub  # noqa: E402
from polyformer.models.architectures import Transformer  # noqa: E402
from polyformer.models.generation import GenerationConfig  # noqa: E402
from polyformer.models.presets import create_model  # noqa: E402

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 40,
}
PATTERN = Window(3) | Global(1)
TEXTS = [f"line {i} of a small text" for i in range(60)]


def model(preset: str = "bert-base", **options: Any) -> Transformer:
    """Of no public family, by its pattern."""
    torch.manual_seed(0)
    return create_model(preset, **SIZES, attention=PATTERN, **options).eval()


def saved(inner: Transformer, folder: Path, algorithm: Any = "wordpiece") -> Path:
    """The wrapped model and a tokenizer, as a user would leave them."""
    hub.wrap(inner).save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm=algorithm, vocab_size=60), TEXTS).save(folder)
    return folder


HEADS = {
    "MaskedLM": ("bert-base", None),
    "SequenceClassification": ("bert-base", {"kind": "classify", "num_labels": 3}),
    "TokenClassification": ("bert-base", {"kind": "tag", "num_labels": 4}),
    "QuestionAnswering": ("bert-base", {"kind": "span"}),
    "CausalLM": ("gpt2", None),
    "Seq2SeqLM": ("transformer-base", None),
}


@pytest.mark.parametrize("task", HEADS)
def test_auto_classes_load_what_was_saved(task: str, tmp_path: Path):
    preset, head = HEADS[task]
    inner = model(preset, **({} if head is None else {"head": head}))
    folder = saved(inner, tmp_path)
    again = getattr(transformers, f"AutoModelFor{task}").from_pretrained(folder)
    assert type(again).__name__ == f"PolyformerFor{task}"
    ids = torch.randint(60, (2, 9))
    labels = inner.config.head.example_labels(2, 9, 60)
    assert labels is not None
    theirs = {"labels": labels}
    if task == "QuestionAnswering":
        theirs = {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
    actual, expected = again(input_ids=ids, **theirs), inner(ids, labels=labels)
    assert torch.equal(actual.loss, expected.loss)
    logits = (
        torch.stack([actual.start_logits, actual.end_logits], -1)
        if "start_logits" in actual
        else actual.logits
    )
    assert torch.equal(logits, expected.logits)
    assert torch.equal(polyformer.from_pretrained(folder)(ids, labels=labels).loss, expected.loss)


def test_pipelines(tmp_path: Path):
    guess = transformers.pipeline("fill-mask", model=str(saved(model(), tmp_path / "mlm")), top_k=3)
    assert len(guess(f"line {guess.tokenizer.mask_token} of a text")) == 3
    inner = model(head={"kind": "classify", "num_labels": 3})
    judge = transformers.pipeline("text-classification", model=str(saved(inner, tmp_path / "classify")))
    both = judge(["a text", "line 3 of a small text"], batch_size=2)  # padded by the pipeline
    alone = [judge(text)[0] for text in ("a text", "line 3 of a small text")]
    for a, b in zip(both, alone, strict=True):
        assert a["label"] == b["label"]
        assert a["score"] == pytest.approx(b["score"], abs=1e-5)
    tagger = transformers.pipeline(
        "token-classification",
        model=str(saved(model(head={"kind": "tag", "num_labels": 3}), tmp_path / "tag")),
    )
    assert len(tagger("line 3 of a text")) >= 1


def test_text_generation(tmp_path: Path):
    inner = model("gpt2")
    folder = saved(inner, tmp_path, "bytes" if SIZES["vocab_size"] > 260 else "wordpiece")
    write = transformers.pipeline("text-generation", model=str(folder))
    text = write("line 3 of", max_new_tokens=4, do_sample=False, return_tensors=True)[0]
    ids = torch.tensor([write.tokenizer("line 3 of")["input_ids"]])
    expected = inner.generate(ids, config=GenerationConfig(max_new_tokens=4)).sequences
    assert text["generated_token_ids"] == expected[0].tolist()


def test_trainer_learns_saves_and_goes_on(tmp_path: Path):
    wrapped = hub.wrap(model(head={"kind": "classify", "num_labels": 2}))
    rows = [{"input_ids": [5 + i % 2] * 6, "attention_mask": [1] * 6, "labels": i % 2} for i in range(64)]
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-2,
        "save_steps": 8,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 4,
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(**settings, max_steps=16)
    trainer = transformers.Trainer(model=wrapped, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    assert polyformer.from_pretrained(tmp_path / "checkpoint-16").config.head.kind == "classify"
    longer = transformers.TrainingArguments(**settings, max_steps=20, activation_checkpointing=True)
    again = transformers.Trainer(model=wrapped, args=longer, train_dataset=rows)
    assert again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16")).global_step == 20
    assert wrapped.model.encoder is not None
    assert wrapped.model.encoder.recompute


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers so
def test_low_rank_adapters(tmp_path: Path):
    peft = pytest.importorskip("peft")
    inner = model(head={"kind": "classify", "num_labels": 2})
    wrapped = hub.wrap(inner)
    adapted = peft.get_peft_model(
        wrapped, peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    )
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert not any("feedforward" in name for name in trained)
    ids, labels = torch.randint(60, (4, 9)), torch.tensor([0, 1, 0, 1])
    before = adapted(input_ids=ids, labels=labels).loss
    optimizer = torch.optim.Adam(
        [parameter for parameter in adapted.parameters() if parameter.requires_grad], 1e-2
    )
    for _ in range(15):
        optimizer.zero_grad()
        adapted(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    expected = adapted(input_ids=ids).logits
    assert adapted(input_ids=ids, labels=labels).loss < before
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
