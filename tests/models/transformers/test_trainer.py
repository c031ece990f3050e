"""The Trainer makes of ours what it makes of transformers' own model with the same weights."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import V, texts, transformers, twins

from launching import torchrun
from polyformer.core.host_values import IGNORED

CASES = {
    "causal": ("gptj", "ForCausalLM"),
    "masked": ("bert", "ForMaskedLM"),
    "translation": ("t5", "ForConditionalGeneration"),
}


def rows(kind: str, number: int = 16) -> list[dict[str, Any]]:
    """Texts of several lengths, so that the batches have unequal numbers of labels."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for i in range(number):
        ids = torch.randint(4, V, (5 + 3 * (i % 5),), generator=generator)
        labels = ids.clone()
        if kind == "masked":
            labels[::2] = IGNORED
        elif kind == "translation":
            labels = ids.flip(0)[: 3 + i % 4]
        data.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return data


def padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([row[name] for row in batch], True, value) for name, value in fill.items()}


def with_targets(batch: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    return batch | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}


def trained(
    model: Any,
    folder: Path,
    data: list[dict[str, Any]],
    collator: Any = None,
    callbacks: list[transformers.TrainerCallback] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Losses and norms of gradients of plain gradient descent, and an evaluation."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.5,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "seed": 1,
    }
    if collator is None and model.config.is_encoder_decoder:  # label smoothing takes the labels away
        collator = lambda batch: with_targets(padded(batch), model)  # noqa: E731
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**(settings | options)),
        train_dataset=data,
        eval_dataset=data[:5],
        data_collator=collator or padded,
        callbacks=callbacks,
    )
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    return [{name: row[name] for name in names if name in row} for row in trainer.state.log_history[:-1]]


def same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    assert any("grad_norm" in row for row in ours)
    assert any("eval_loss" in row for row in ours)
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=2e-5)


SMOOTHING = {"label_smoothing_factor": 0.2}
ACCUMULATING = {"gradient_accumulation_steps": 4}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("causal", {}),
    "causal, accumulating": ("causal", ACCUMULATING),
    "causal, smoothing and accumulating": ("causal", SMOOTHING | ACCUMULATING),
    "causal, recomputing": ("causal", {"activation_checkpointing": True, "gradient_accumulation_steps": 2}),
    "masked, smoothing": ("masked", SMOOTHING),
    "translation": ("translation", {}),
    "translation, smoothing and accumulating": ("translation", SMOOTHING | ACCUMULATING),
}


@pytest.mark.parametrize("case", RUNS)
def test_losses_and_gradients(case: str, tmp_path: Path):
    kind, options = RUNS[case]
    ours, theirs = twins(*CASES[kind], torch.float32)
    actual, expected = (trained(model, tmp_path, rows(kind), **options) for model in (ours, theirs))
    same(actual, expected)
    assert ours.is_activation_checkpointing == ("activation_checkpointing" in options)


@pytest.mark.parametrize("kind", ["masked", "translation", "classification"])
def test_accumulating_is_one_large_batch(kind: str, tmp_path: Path):
    """transformers' own models of these kinds forget to divide; the large batch is what is meant."""
    if kind == "classification":
        data = [{"input_ids": text, "labels": torch.tensor(i % 3)} for i, text in enumerate(texts(16, 6))]
    else:
        data = rows(kind)
    collator = transformers.default_data_collator if kind == "classification" else padded
    runs = []
    for rows_a_step, steps in ((2, 4), (8, 1)):
        ours, _ = twins(*CASES.get(kind, ("bert", "ForSequenceClassification")), torch.float32)
        runs.append(
            trained(
                ours,
                tmp_path,
                data,
                collator,
                per_device_train_batch_size=rows_a_step,
                gradient_accumulation_steps=steps,
            )
        )
    same(*runs)


def test_documents_packed_by_positions(tmp_path: Path):
    """Each sees itself alone, as in transformers."""
    data = [{"input_ids": row["input_ids"].tolist()} for row in rows("causal")]
    ours, theirs = twins(*CASES["causal"], torch.float32)
    actual, expected = (
        trained(
            model,
            tmp_path,
            data,
            transformers.DataCollatorWithFlattening(),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
        )
        for model in (ours, theirs)
    )
    same(actual, expected)


def test_evaluating_by_generation(tmp_path: Path):
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        predict_with_generate=True,
        generation_max_length=6,
        report_to=[],
        per_device_eval_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
    )
    results = []
    for model in twins(*CASES["translation"], torch.float32):
        trainer = transformers.Seq2SeqTrainer(model=model, args=arguments, data_collator=padded)
        results.append(trainer.predict(rows("translation", 8)))
    assert results[0].predictions.tolist() == results[1].predictions.tolist()
    assert results[0].metrics["test_loss"] == pytest.approx(results[1].metrics["test_loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "cu_seq_lens_q"])
def test_packed_documents_are_computed_as_if_alone(name: str):
    ours, _ = twins("gptj", "ForCausalLM")
    lengths, ids = [5, 9, 10], texts(1)
    places = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int(),
        "cu_seq_lens_q": torch.tensor([0, 5, 14, 24], dtype=torch.int32),
    }
    packed = ours(input_ids=ids, **{name: places[name]}).logits
    alone = torch.cat([ours(input_ids=document).logits for document in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone)


def both_processes(out: Path) -> None:
    """What each of two processes runs."""
    import torch.distributed

    torch.set_num_threads(1)
    kinds = twins(*CASES["causal"], torch.float32)
    runs = [
        trained(kind, out, rows("causal"), gradient_accumulation_steps=2, ddp_backend="gloo")
        for kind in kinds
    ]
    if torch.distributed.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(runs))
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path: Path):
    ended = torchrun(__file__, tmp_path, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ours, theirs = json.loads((tmp_path / "found.json").read_text())
    same(ours, theirs)
    one_process, _ = twins(*CASES["causal"], torch.float32)
    alone = trained(
        one_process, tmp_path, rows("causal"), per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    for row, other in zip(ours[:2], alone[:2]):  # its evaluation counts rows twice that fill a last batch
        assert row == pytest.approx(other, rel=2e-5)


if __name__ == "__main__":
    both_processes(Path(sys.argv[1]))
