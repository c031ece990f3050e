"""Runs of models that remember: what is carried, saved and taken up again, and what evaluation reads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.core.files import read_tensors
from polyformer.data import Splits
from polyformer.models.architectures import build_model
from polyformer.training.config import EngineConfig
from polyformer.training.engine import Engine, RecurrentLoss
from polyformer.training.recipes import Recipe, fit
from polyformer.training.recipes.distill import distillation_recipe
from polyformer.training.tasks import TaskWithData
from tiny_recipes import tiny_recipe

MEMORY = {"position": "transformer_xl", "memory": "recurrent(length=24)", "dropout": 0.1}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{index} lines of {index * index} words say little\n" for index in range(40)))
    return path


def recipe(path: Path, **changes: Any) -> Recipe:
    task = {"feed": "in_order", "ngram_order": 0}
    return tiny_recipe(path, **{"task": task, "model": MEMORY, **changes})


def test_a_resumed_run_remembers_what_it_had_read(text: Path, tmp_path: Path):
    """Bit for bit, over the end of an epoch too; without a memory it ends elsewhere."""
    run, settings = tmp_path / "run", recipe(text, training={"steps": 30, "saving": {"keep": 20}})
    files = [run / f"checkpoints/step-00000030/{name}.safetensors" for name in ("model", "memory")]
    fit(settings, run)
    whole = [file.read_bytes() for file in files]
    for step in (6, 24):
        fit(settings, run, resume=True, from_step=step)
        assert [file.read_bytes() for file in files] == whole
    memory = run / "checkpoints/step-00000006/memory.safetensors"
    assert read_tensors(memory)["state.layers.0.memory.vectors"].abs().sum() > 0
    other = fit(
        recipe(text, training={"steps": 30}, model={**MEMORY, "memory": "recurrent(length=0)"}),
        tmp_path / "other",
    )
    assert (other.run.folder / "checkpoints/step-00000030/model.safetensors").read_bytes() != whole[0]


def test_a_checkpoint_whose_memory_is_damaged_is_not_taken_up(text: Path, tmp_path: Path):
    fit(recipe(text, training={"steps": 4}), tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-00000004/memory.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"memory\.safetensors is damaged.*--from-step 2"):
        fit(recipe(text, training={"steps": 8}), tmp_path / "run", resume=True)


def fitted(path: Path, length: int = 1000) -> tuple[Any, Any, Any]:
    """The tiny run's task, its model in float64 without dropout, and rows of its text."""
    settings = recipe(path, model={**MEMORY, "memory": f"recurrent(length={length})", "dropout": 0.0})
    rows = [{"text": line} for line in path.read_text().splitlines()]
    tokenizer = settings.task.tokenizer(settings.tokenizer, rows)
    task = settings.task.build(tokenizer)
    torch.manual_seed(0)
    return task, build_model(task.adapt(settings.model_config())).double(), rows


def test_losses_of_the_batches_are_those_of_whole_rows(text: Path):
    """Weights stay here, and the memory covers an epoch: segments, edges and documents change nothing."""
    task, model, rows = fitted(text)
    fitting = TaskWithData(task, Splits(rows, None, None), 0)
    recurrent_loss = RecurrentLoss(model, fitting, Engine(EngineConfig(device="cpu")), None)
    total = count = 0.0
    for batch in fitting.batches(0, 0, 0, 1):
        weight = fitting.weight(batch)
        total += float(recurrent_loss.loss(model, batch).detach()) * weight
        count += weight
    laid = [torch.from_numpy(table.astype("int64")) for table in fitting.train.laid(0)]
    expected = model(laid[0], document_ids=laid[1], shift_labels=laid[2]).loss
    assert abs(total / count - float(expected.detach())) < 1e-10


@pytest.mark.parametrize("side_by_side", [1, 3])
def test_evaluation_with_a_memory_is_each_document_read_at_once(text: Path, side_by_side: int):
    task, model, rows = fitted(text)
    model.eval()
    with torch.no_grad():
        measured = task.metrics.measure(model, task.rows.held_out(rows, side_by_side))
        nats = tokens = 0.0
        for document in task.rows.documents(rows):
            ids = torch.tensor([document])
            nats += float(model(ids, labels=ids).loss) * (len(document) - 1)
            tokens += len(document) - 1
    assert abs(measured["loss"] - nats / tokens) < 1e-10
    scores = task.score(model, rows)
    assert scores["tokens"] == tokens
    assert scores["memory_length"] == 1000
    short = fitted(text, 3)[1]
    short.load_state_dict(model.state_dict())
    assert task.score(short.eval(), rows)["loss"] != pytest.approx(scores["loss"], abs=1e-6)


def test_a_model_without_a_memory_reads_the_same_segments(text: Path, tmp_path: Path):
    result = fit(recipe(text, model={"position": "rope"}), tmp_path / "run")
    assert result.scores["validation"]["loss"] > 0
    assert not (tmp_path / "run/checkpoints/step-00000004/memory.safetensors").exists()


def test_sinks_learn_from_packed_rows(text: Path, tmp_path: Path):
    sinks = {"position": "rope", "memory": "sinks(first=1, length=4)"}
    assert fit(recipe(text, model=sinks, task={"feed": "packed"}), tmp_path / "run").run.folder.exists()


def test_a_memory_without_rows_in_order_is_refused(text: Path, tmp_path: Path):
    with pytest.raises(InputError, match="rows in random order leave nothing to remember"):
        fit(recipe(text, task={"feed": "packed"}), tmp_path / "run")
    run = fit(recipe(text), tmp_path / "run").run
    with pytest.raises(InputError, match="a student with a memory cannot be distilled"):
        fit(distillation_recipe(run.folder, 1), tmp_path / "student")
    task, model, rows = fitted(text)
    engine = Engine(EngineConfig(device="cpu"))
    engine.data_world = 3
    with pytest.raises(InputError, match="4 rows that continue their texts cannot be dealt evenly to 3"):
        RecurrentLoss(model, TaskWithData(task, Splits(rows, None, None), 0), engine, None)
    with pytest.raises(InputError, match="'in_order' lays out all documents"):
        task.rows.training_batches(iter(rows), 0)


def test_a_store_is_saved_with_the_run_and_evaluated_at_any_size(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A run without a memory is given a store, trained further and resumed; its size changes perplexity."""
    small = {"position": "rope", "memory": "none"}
    fit(recipe(text, model=small, training={"steps": 4}), tmp_path / "plain")
    memory = "memorizing(length=4, store=64, neighbours=4)"
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "begun"), "--memory", memory]) == 0
    assert "newly initialized: decoder.memory.gate, decoder.memory.temperature" in capsys.readouterr().out
    settings = recipe(text, training={"steps": 12}).to_dict()
    settings = Recipe.from_dict({**settings, "model": {"pretrained": str(tmp_path / "begun")}})
    run, name = tmp_path / "run", "checkpoints/step-00000012/memory.safetensors"
    fit(settings, run)
    whole = (run / name).read_bytes()
    fit(settings, run, resume=True, from_step=10)
    assert (run / name).read_bytes() == whole
    capsys.readouterr()
    outputs = []
    for size in ("0", "64"):
        assert main(["evaluate", str(run), "--data", str(text), "--store-size", size]) == 0
        outputs.append(capsys.readouterr().out)
        assert "store" in outputs[-1]
    assert outputs[0] != outputs[1]
    assert main(["evaluate", str(run), "--data", str(text), "--progress", str(tmp_path / "progress")]) == 2
    assert "--progress: a model with a memory must read its text" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "plain"), "--store-size", "9"]) == 2
    assert "store_size: this model has no store" in capsys.readouterr().err


def test_of_a_model_that_was_trained_the_gates_alone_may_learn(text: Path, tmp_path: Path):
    model = {**MEMORY, "memory": "memorizing(length=4, store=64, neighbours=4, trains=memory)"}
    begun = fit(recipe(text, model=model, training={"steps": 2}), tmp_path / "begun").model.state_dict()
    settings = recipe(text, training={"steps": 6}).to_dict()
    settings = Recipe.from_dict({**settings, "model": {"pretrained": str(tmp_path / "begun")}})
    ended = fit(settings, tmp_path / "run").model.state_dict()
    changed = {name for name, tensor in begun.items() if not torch.equal(tensor, ended[name])}
    assert changed == {"decoder.memory.gate", "decoder.memory.temperature"}
