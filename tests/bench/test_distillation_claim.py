"""The claim about soft targets in sizes that prove nothing: it runs, goes on, and judges by its rule."""

import dataclasses
from pathlib import Path

import pytest

from polyformer.bench.experiment import DIFFERS, REPRODUCED, UNSHOWN
from polyformer.bench.reproduce.distillation import (
    EXPERIMENT,
    LABELS,
    TARGETS,
    TEACHER,
    DistillationClaim,
    run,
    verdict,
)
from polyformer.core.errors import InputError
from polyformer.recipes import Run


def test_the_claim_runs_and_goes_on(tmp_path: Path):
    rows = [("a good film it is", "1"), ("a bad film it was", "0"), ("good", "1"), ("bad and worse", "0")]
    for name in ("train", "test"):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows * 4))
    config = DistillationClaim(sst2=str(tmp_path), out=str(tmp_path / "out"), **EXPERIMENT.quick)
    results = run(config)
    assert run(config) == results
    assert list(results) == [TEACHER, LABELS, TARGETS]
    lesson = Run.open(tmp_path / "out" / "soft-0").recipe
    assert lesson.distillation is not None
    assert Path(lesson.distillation.teacher) == tmp_path / "out" / "teacher-0"
    assert lesson.data.path == str(tmp_path / "out" / "data" / "few.tsv")
    assert len((tmp_path / "out" / "data" / "few.tsv").read_text().splitlines()) == 9
    with pytest.raises(InputError, match="other settings"):
        run(dataclasses.replace(config, temperature=4.0))


def test_the_verdict_follows_its_rule():
    def judged(labels: tuple[float, float], targets: tuple[float, float]) -> str:
        accuracies = {TEACHER: (0.8, 0.8), LABELS: labels, TARGETS: targets}
        return verdict({name: dict(enumerate(own)) for name, own in accuracies.items()}, 1800).outcome

    assert judged((0.6, 0.6), (0.71, 0.70)) == REPRODUCED
    assert judged((0.6, 0.6), (0.69, 0.68)) == DIFFERS, "less than half of the way"
    assert judged((0.6, 0.7), (0.79, 0.69)) == DIFFERS, "below with one seed"
    assert judged((0.79, 0.79), (0.8, 0.8)) == UNSHOWN


def test_without_data_it_says_which():
    with pytest.raises(InputError, match="sst2"):
        DistillationClaim()
