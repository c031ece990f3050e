"""Distillation: what a student begins with, its loss by definition, and a run that resumes as any other."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.training.objectives import DistillationConfig, chosen_layers
from polyformer.training.recipes import Recipe, Run, fit
from polyformer.training.recipes.distill import (
    DistillationTask,
    copy_teacher_layers,
    distillation_recipe,
    labelled,
    logits_at,
    real_tokens,
    student_config,
)
from polyformer.training.tasks import TaskWithData

TEXT = {
    "classify": "text,label\n" + "good film,pos\nbad film it is,neg\nfair enough,pos\n" * 8,
    "lm": "".join(f"line {i} of a small text\n" for i in range(40)),
    "mlm": "".join(f"line {i} of a small text\n" for i in range(40)),
    "translate": "source\ttarget\n" + "".join(f"word {i}\tWort {i}\n" for i in range(20)),
}
NAMES = {"classify": "rows.csv", "translate": "pairs.tsv"}
MODELS = {"lm": "decoder-tiny", "translate": "transformer-tiny"}


def recipe(folder: Path, kind: str, **changes: Any) -> Recipe:
    """A run of four layers of 16 that trains in a moment."""
    path = folder / NAMES.get(kind, "lines.txt")
    path.write_text(TEXT[kind])
    return Recipe.from_dict(
        {
            "task": {"kind": kind, "batch_tokens": 512},
            "model": {
                "preset": MODELS.get(kind, "encoder-tiny"),
                "hidden_size": 16,
                "num_hidden_layers": 4,
                "dropout": 0.1,
            },
            "data": {"path": str(path), "validation_fraction": 0.25},
            "tokenizer": {"algorithm": "bytes"},
            "optimizer": {"kind": "adamw", "lr": 1e-2},
            "training": {"steps": 4, "engine": {"device": "cpu"}, "saving": {"checkpoint_every": 2}},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("teachers")
    return {kind: fit(recipe(root, kind), root / kind).run.folder for kind in TEXT}


def config(**options: Any) -> ModelConfig:
    return model_config(
        "encoder-tiny", {"num_hidden_layers": 5, "hidden_size": 16, "dropout": 0.0, **options}
    )


POSITIONS = ["learned", "learned_per_layer", "shaw", "da", {"kind": "transformer_xl"}, "t5"]


@pytest.mark.parametrize("position", POSITIONS, ids=str)
def test_a_student_is_the_teacher_without_some_layers(position: Any):
    """Layers 0, 2 and 4 of 5, each with its own positions: equal to a teacher whose others do nothing."""
    torch.manual_seed(0)
    teacher = Transformer(config(position=position)).double().eval()
    for parameter in teacher.parameters():  # tables that begin with zeros would agree anyhow
        torch.nn.init.normal_(parameter, std=0.3)
    student = Transformer(student_config(teacher.config, 3)).double().eval()
    copy_teacher_layers(student, teacher)
    assert teacher.encoder is not None
    for index in (1, 3):  # pre-norm: a layer whose sub-layers write nothing passes its input on
        layer = teacher.encoder.layers[index]
        for name, parameter in layer.named_parameters():
            if "output" in name or "down" in name:
                torch.nn.init.zeros_(parameter)
        if position == "learned_per_layer":
            torch.nn.init.zeros_(teacher.encoder.position.get_parameter(f"tables.{index}.weight"))
    ids = torch.randint(3, 300, (2, 9))
    torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=1e-10, atol=1e-10)


def test_groups_and_turns_are_kept():
    shared = student_config(config(num_hidden_groups=1), 2)
    assert shared.encoder is not None
    assert (shared.encoder.num_hidden_layers, shared.encoder.num_hidden_groups) == (2, 1)
    copy_teacher_layers(Transformer(shared), Transformer(config(num_hidden_groups=1)))
    pairs = student_config(config(num_hidden_layers=4, num_hidden_groups=2, layers_per_group=2), None).encoder
    assert pairs is not None
    assert (pairs.num_hidden_layers, pairs.num_hidden_groups, pairs.layers_per_group) == (2, 1, 2)
    from polyformer.attention.patterns import Full, PerLayer, Window

    layers = PerLayer((Window(1), Window(2), Window(3), Window(4), Full()))
    turns = student_config(config(attention=layers), 3)
    assert turns.encoder is not None
    patterns = [turns.encoder.attention.mechanism.for_layer(i).pattern for i in range(3)]  # type: ignore[attr-defined]
    assert patterns == [Window(1), Window(3), Full()]
    assert student_config(config()).encoder == dataclasses.replace(config().encoder, num_hidden_layers=2)  # type: ignore[type-var]


def test_a_student_that_differs_in_more_than_layers_is_refused():
    teacher = Transformer(config())
    with pytest.raises(
        InputError, match=r"student: 'tokens.weight' has shape \(99, 16\), the teacher's \(300,"
    ):
        copy_teacher_layers(Transformer(student_config(config(vocab_size=99), 2)), teacher)
    with pytest.raises(InputError, match=r"student: its 'encoder\.position\.w' is none of the teacher's"):
        copy_teacher_layers(Transformer(student_config(config(position="da"), 2)), teacher)
    with pytest.raises(InputError, match="layers: expected 1 to 5, as many as the teacher has, got 6"):
        student_config(config(), 6)


@pytest.mark.parametrize("kind", TEXT)
def test_the_loss_is_its_definition(kind: str, teachers: dict[str, Path], tmp_path: Path):
    """Over the whole logits, with masks written out.

    The models compute in float64, the losses in float32 of log-probabilities; they are multiplied by T^2.
    """
    settings = DistillationConfig(teacher="t", temperature=3.0, soft=0.7, hard=0.3, cosine=0.9)
    fitting, batch = distilling(teachers[kind], settings)
    student, teacher = fitting.student.double().eval(), fitting.teacher.double()
    mine, other = student(**batch), teacher(**batch)
    logits, taught = mine.logits, other.logits
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    if kind in ("mlm", "translate"):
        logits, taught = (all_logits[batch["labels"] != -100] for all_logits in (logits, taught))
    if kind == "lm":
        follows = batch["document_ids"][:, 1:] == batch["document_ids"][:, :-1]
        logits, taught = logits[:, :-1][follows], taught[:, :-1][follows]
    if kind == "translate":
        real = batch["labels"] != -100
    p, q = (F.softmax(scores / 3, -1) for scores in (taught, logits))
    soft = 9 * (p * (p.log() - q.log())).sum(-1).mean()
    angle = F.cosine_similarity(mine.last_hidden_state, other.last_hidden_state, dim=-1)[real].mean()
    expected = 0.7 * soft + 0.3 * mine.loss + 0.9 * (1 - angle)
    loss = fitting.loss(student, batch)
    rounding = 8 * 3**2 * torch.finfo(torch.float32).eps
    assert loss.item() == pytest.approx(expected.item(), abs=rounding)
    loss.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def distilling(
    folder: Path, settings: DistillationConfig
) -> tuple[DistillationTask, dict[str, torch.Tensor]]:
    from polyformer.data import load

    run = Run.open(folder)
    teacher = run.model("cpu")
    student = Transformer(student_config(teacher.config))
    copy_teacher_layers(student, teacher)
    splits = load(run.recipe.data, run.recipe.task.needs)
    fitting = DistillationTask(run.task, splits, 0, student, teacher, settings)
    return fitting, next(iter(fitting.batches(0, 0, 0, 1)))


def test_a_student_equal_to_its_teacher_has_nothing_to_learn_but_labels(teachers: dict[str, Path]):
    fitting, batch = distilling(teachers["classify"], DistillationConfig(teacher="t", hard=0.0))
    same = DistillationTask(fitting.task, _none(), 0, fitting.teacher, fitting.teacher, fitting.config)
    assert same.loss(fitting.teacher, batch).item() == pytest.approx(0.0, abs=1e-6)
    assert fitting.loss(fitting.student.eval(), batch).item() > 1e-4


def _none() -> Any:
    from polyformer.data import Splits

    return Splits([{"text": "good", "label": "pos"}], None, None)  # type: ignore[arg-type]


def test_only_labelled_and_real_tokens_are_looked_at(teachers: dict[str, Path]):
    fitting, batch = distilling(teachers["mlm"], DistillationConfig(teacher="t"))
    chosen = labelled(fitting.student.config, batch)
    assert chosen is not None
    assert chosen.sum() == fitting.weight(batch) < batch["input_ids"].numel() / 3
    output = fitting.student.eval()(**batch)
    torch.testing.assert_close(logits_at(fitting.student, output, chosen), output.logits[chosen])
    assert torch.equal(real_tokens(fitting.student.config, batch), batch["attention_mask"].bool())


def test_a_distilled_run_resumes_bit_for_bit_and_is_read_as_any_other(
    teachers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "student"
    words = ["distill", str(teachers["classify"]), "--out", str(out)]
    assert main([*words, "--distillation.soft", "3", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "teacher, validation",
        "student, validation",
        "% of the teacher's accuracy",
        "times as fast",
    ):
        assert words in printed
    run = Run.open(out)
    assert run.recipe.seed == 5
    assert run.recipe.distillation == DistillationConfig(teacher=str(teachers["classify"]), soft=3.0)
    model, teacher = run.model("cpu"), Run.open(teachers["classify"]).model("cpu")
    assert model.config.encoder == dataclasses.replace(teacher.config.encoder, num_hidden_layers=2)  # type: ignore[type-var]
    assert run.tokenizer.encode("good") == Run.open(teachers["classify"]).tokenizer.encode("good")
    whole = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    (out / "model.safetensors").unlink()
    assert main(["distill", "--resume", str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == whole
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    assert main(["classify", str(out), "good film"]) == 0
    assert "pos\t" in capsys.readouterr().out


def test_the_teacher_stays_as_it_was_and_the_student_begins_there(teachers: dict[str, Path], tmp_path: Path):
    before = (teachers["lm"] / "model.safetensors").read_bytes()
    recipe = distillation_recipe(teachers["lm"], 1)
    still = dataclasses.replace(recipe.optimizer, lr=1e-12, weight_decay=0.0)  # type: ignore[call-arg]
    fitted = fit(dataclasses.replace(recipe, optimizer=still), tmp_path / "out")
    theirs = Run.open(teachers["lm"]).model("cpu").state_dict()
    for name, tensor in fitted.model.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-8)
    assert (teachers["lm"] / "model.safetensors").read_bytes() == before
    assert not any("teacher" in name for name in fitted.model.state_dict())
    assert chosen_layers(4, 1) == [0]
    assert isinstance(fitted.model, Transformer)


def test_bad_input_is_named(teachers: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def complaint(*words: str) -> str:
        assert main(["distill", *words]) == 2
        return capsys.readouterr().err

    teacher = str(teachers["classify"])
    assert "TEACHER is missing: name the folder of the run to distill" in complaint()
    assert "no such directory" in complaint(str(tmp_path / "none"))
    assert "layers: expected 1 to 4, as many as the teacher has, got 9" in complaint(teacher, "--layers", "9")
    assert "this run has no teacher; use polyformer train --resume" in complaint("--resume", teacher)
    assert "change nothing but the layers" in complaint(
        teacher, "--out", str(tmp_path / "x"), "--model.embedding.type_vocab_size", "2"
    )
    assert not (tmp_path / "x").exists()


def test_a_task_without_soft_labels_is_refused(teachers: dict[str, Path]):
    fitting, _ = distilling(teachers["classify"], DistillationConfig(teacher="t"))
    head = dataclasses.replace(fitting.student.config.head, problem="regression")  # type: ignore[call-arg]
    fitting.student.config = dataclasses.replace(fitting.student.config, head=head)
    with pytest.raises(InputError, match="expected one of several labels for a text"):
        DistillationTask(fitting.task, _none(), 0, fitting.student, fitting.teacher, fitting.config)
    embed = model_config("encoder-tiny", {"head": "embed"})
    with pytest.raises(InputError, match="with the head 'embed' is not learnt from a teacher"):
        DistillationTask(fitting.task, _none(), 0, Transformer(embed), fitting.teacher, fitting.config)
    assert TaskWithData is DistillationTask.__bases__[0]


def test_a_fresh_student_has_weights_of_its_own_and_any_size(teachers: dict[str, Path], tmp_path: Path):
    options = {"preset": "encoder-tiny", "hidden_size": 12, "num_hidden_layers": 1, "dropout": 0.0}
    lesson = {"teacher": str(teachers["classify"]), "fresh": True, "cosine": 0.0}
    data = recipe(tmp_path, "classify").to_dict() | {"model": options, "distillation": lesson}
    data["optimizer"] = {"kind": "adamw", "lr": 1e-12}
    student = fit(Recipe.from_dict(data), tmp_path / "taught").model
    alone = fit(Recipe.from_dict(data | {"distillation": None}), tmp_path / "alone").model
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(student.state_dict()[name], tensor, rtol=0, atol=1e-9)
    data["distillation"] = lesson | {"cosine": 1.0}
    with pytest.raises(InputError, match="hidden states"):
        fit(Recipe.from_dict(data), tmp_path / "wide")
