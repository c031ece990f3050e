"""The claim that a teacher's soft targets make up for most of the data that its student does not see (Hinton
et al. 2015, section 6, table 5), CPU-sized.

A classifier of sentences, the teacher, learns from all of SST-2. Two of its own size, with fresh weights, see
a few of the sentences alone, for as many steps: one learns from their labels, one from what the teacher
predicts of them and no label. Compared is the accuracy on the test sentences.

The rule, set before any run: with every seed the student of the teacher is above the student of the labels,
and in the mean it makes up at least `HALF` of what that one lies behind the teacher (in the paper nine
tenths). Not shown where, in the mean, the labels' student is not two standard errors of the test behind the
teacher.

Deviations: two classes in place of thousands of states, so that a soft target says less; sentences in place
of speech, no early stopping.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyformer.bench.claims import sized, taken_up, write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.labelled_texts import Texts, prepare
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.recipes import Recipe
from polyformer.training.config import at_least

TEACHER, LABELS, TARGETS = "teacher, all sentences", "labels of a few", "soft targets of a few"

HALF = 0.5
"""The share of the way from the labels' student to the teacher that counts."""

EXPERIMENT = Experiment(
    sources={"sst2": "sst2"},
    quick={
        "seeds": (0,),
        "texts": 40,
        "few": 8,
        "tests": 20,
        "length": 16,
        "batch_tokens": 64,
        "steps": 2,
        "width": 16,
        "heads": 2,
        "vocabulary": 100,
    },
    claims=(
        Claim(
            name="distillation",
            says="a teacher's soft targets make up for most of the data that its student does not see",
            paper="Hinton et al. 2015",
            section="section 6, table 5",
            published="frames of speech right: 58.9 % with all data, with 3 % of it 44.5 % from labels and "
            "57.0 % from soft targets",
            measured="test accuracy of classifiers of SST-2's sentences: a teacher of all, students of 3 % "
            "of them by labels or by the teacher's predictions",
            scale="one layer of 64, 6,920 sentences and 208 of them, 400 steps, three seeds",
            rule="above the labels' student with every seed, and in the mean at least half of the way from "
            "it to the teacher; not shown where that is not two standard errors",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationClaim(Config):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    sst2: str | None = None  # a directory with {train,test}.tsv[.gz]: text, label
    seeds: tuple[int, ...] = (0, 1, 2)
    texts: int = 10_000  # to train the teacher on, at most
    few: int = 208  # of them for the students, evenly spread: 3 %
    tests: int = 5000
    length: int = 64  # tokens of a text; more are cut off
    batch_tokens: int = 2048
    steps: int = 400
    layers: int = 1
    width: int = 64
    heads: int = 4
    vocabulary: int = 10_000
    temperature: float = 2.0
    lr: float = 2e-3
    out: str = "runs/distillation"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, layers=self.layers, width=self.width, heads=self.heads)
        at_least(2, few=self.few, texts=self.texts, tests=self.tests)
        at_least(16, length=self.length)
        if not self.seeds:
            raise InputError("seeds: expected one or more")
        if self.sst2 is None:
            raise InputError("sst2: name the directory of the labelled sentences, by --sst2 DIR")


Accuracies = Mapping[str, Mapping[int, float]]
"""By model and seed."""


def run(config: DistillationClaim) -> dict[str, dict[int, float]]:
    """Train all; write OUT/distillation.csv and .png, print the table and the verdict."""
    assert config.sst2 is not None
    folder = Path(config.out)
    texts = prepare(
        "sst2", config.sst2, config.length - 2, config.texts, config.tests, config.vocabulary, folder / "data"
    )
    write_few(texts, config.few)
    results: dict[str, dict[int, float]] = {TEACHER: {}, LABELS: {}, TARGETS: {}}
    for seed in config.seeds:
        for name, accuracies in results.items():
            teacher = folder / f"{place_of(TEACHER)}-{seed}" if name == TARGETS else None
            ours = recipe(config, texts, "train" if name == TEACHER else "few", seed, teacher)
            fitted = taken_up(Recipe.from_dict(ours), folder / f"{place_of(name)}-{seed}")
            accuracies[seed] = fitted.scores["test"]["accuracy"]
            print(f"{name}, seed {seed}: {accuracies[seed]:.1%}", flush=True)
    rows = ((name, *pair) for name, accuracies in results.items() for pair in accuracies.items())
    write_csv(folder / "distillation.csv", ("learnt_from", "seed", "accuracy"), rows)
    curves = {name: [(float(k), v) for k, v in accuracies.items()] for name, accuracies in results.items()}
    line_plot(folder / "distillation.png", curves, "seed", "test accuracy")
    print("\n".join(table(results)))
    conclude(EXPERIMENT, config, [verdict(results, len(texts.test))])
    return results


def place_of(name: str) -> str:
    """The folder of its runs, but for the seed."""
    return name.split()[0].rstrip(",")


def write_few(texts: Texts, few: int) -> None:
    """few.tsv beside the training texts: so many of them, evenly spread."""
    count = min(few, len(texts.train))
    chosen = (texts.train[i * len(texts.train) // count] for i in range(count))
    lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in chosen)]
    atomic_write(texts.folder / "few.tsv", ("\n".join(lines) + "\n").encode())


def recipe(
    config: DistillationClaim, texts: Texts, part: str, seed: int, teacher: Path | None = None
) -> dict[str, Any]:
    """A run over the file `part` of the texts, by its labels or by what the run in `teacher` predicts."""
    lesson = {
        "teacher": str(teacher and teacher.absolute()),
        "fresh": True,
        "temperature": config.temperature,
        "soft": 1.0,
        "hard": 0.0,
        "cosine": 0.0,
    }
    return {
        "task": {
            "kind": "classify",
            "labels": texts.labels,
            "max_length": config.length,
            "too_long": "cut",
            "batch_tokens": config.batch_tokens,
            "token_dropout": 0.1,
        },
        "model": sized("encoder-small", config, dropout=0.3),
        "data": {
            "path": str(texts.folder / f"{part}.tsv"),
            "test": str(texts.folder / "test.tsv"),
            "validation_fraction": 0.0,
        },
        "tokenizer": {"path": str(texts.tokenizer)},
        "optimizer": {"kind": "adamw", "lr": config.lr},
        "schedule": {"kind": "linear", "warmup": min(50, config.steps)},
        "training": {
            "steps": config.steps,
            "reporting": {"log_every": min(20, config.steps), "evaluate_every": config.steps},
            "saving": {"checkpoint_every": config.steps},
        },
        "distillation": None if teacher is None else lesson,
        "seed": seed,
    }


def table(results: Accuracies) -> list[str]:
    """Lines of text: a row for each model, a column for each seed, and their mean."""
    seeds = list(results[TEACHER])
    lines = [f"{'learnt from':<24}" + "".join(f"{f'seed {seed}':>9}" for seed in seeds) + f"{'mean':>9}"]
    for name, accuracies in results.items():
        numbers = [*accuracies.values(), statistics.fmean(accuracies.values())]
        lines.append(f"{name:<24}" + "".join(f"{number:>9.1%}" for number in numbers))
    return lines


def verdict(results: Accuracies, tests: int) -> Verdict:
    """What the accuracies say of the claim."""
    teacher, labels, targets = (
        statistics.fmean(results[name].values()) for name in (TEACHER, LABELS, TARGETS)
    )
    figures = f"(teacher {teacher:.1%}, labels {labels:.1%}, soft targets {targets:.1%})"
    says = "soft targets make up for the data that a student does not see"
    error = (teacher * (1 - teacher) / tests) ** 0.5
    if teacher - labels <= 2 * error:
        return Verdict(UNSHOWN, f"{says}: not shown, for the labels of a few do as well as all {figures}")
    share = (targets - labels) / (teacher - labels)
    higher = sum(results[TARGETS][seed] > accuracy for seed, accuracy in results[LABELS].items())
    holds = higher == len(results[LABELS]) and share >= HALF
    said = "reproduced" if holds else "not reproduced"
    return verdict_of(
        holds,
        f"{says}: {said} {figures[:-1]}; {share:.0%} of the way, above with {higher} of "
        f"{len(results[LABELS])} seeds)",
    )
