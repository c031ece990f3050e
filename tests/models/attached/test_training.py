"""transformers' Trainer, with texts packed into rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attached_models import BY_NAME, OURS, build

import polyformer

LENGTHS = 5, 9, 3, 7, 8, 4


def texts() -> list[dict[str, list[int]]]:
    """Six short texts."""
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 60, (n,), generator=generator).tolist()} for n in LENGTHS]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A row for each text."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model: Any, collator: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after two steps of three texts."""
    options = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        max_steps=2,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        dataloader_pin_memory=False,
    )
    rows: Any = texts()
    trainer = transformers.Trainer(model, options, train_dataset=rows, data_collator=collator)
    trainer.train()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "pattern"), [("Llama", "Window(2) | Global(1)"), ("Gemma3", None)])
def test_packed_rows_train_what_rows_of_their_own_train(name: str, pattern: str | None, tmp_path: Path):
    architecture = BY_NAME[name]
    weights = []
    for collator in (transformers.DataCollatorWithFlattening(), padded):
        model = build(architecture, **architecture.window or {})
        model.set_attn_implementation(OURS)
        if pattern:
            polyformer.attach(model, pattern)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        weights.append(trained(model, collator, tmp_path))
        moved = [key for key, tensor in weights[-1].items() if not torch.equal(tensor, before[key])]
        assert any("self_attn" in key for key in moved)
    for key, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][key], rtol=0, atol=1e-5)
