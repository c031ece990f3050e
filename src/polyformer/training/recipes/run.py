"""The folder of a run: its settings, its results, and checks that a resumed run matches its start.

recipe.yaml        the resolved recipe: the same file trains the same model again
run.json           versions, seed, progress, and finally the metrics
tokenizer.json     together with config.json and model.safetensors the files for `from_pretrained`
config.json
model.safetensors
metrics.csv        metrics during training; also metrics.jsonl
checkpoints/       for resuming
generator/         the generator of ELECTRA, also a model
"""

import dataclasses
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write, read_bounded, write_json
from polyformer.core.foreign_checkpoints import gguf_file
from polyformer.core.parsing import parse_json
from polyformer.core.paths import checked_path
from polyformer.core.ranges import JSON_BYTES, YAML_BYTES
from polyformer.data import DataConfig, Tokenizer
from polyformer.data.sources.checks import Fingerprint, data_changes, of_file
from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import PIECE_FILES
from polyformer.models.architectures import (
    Transformer,
    VisionConfig,
    build_model,
    load_pretrained,
    read_config,
)
from polyformer.models.architectures.pretrained import (
    CONFIG,
    RECIPE,
    RECORD,
    WEIGHTS,
    label_names,
    read_generation,
    write_generation,
)
from polyformer.models.checkpoints import config_of, from_pretrained, start_from
from polyformer.models.checkpoints.adapters import is_adapted
from polyformer.training.checkpoint import Checkpoints, step_of
from polyformer.training.machine import choose_device, versions
from polyformer.training.recipes.recipe import Recipe
from polyformer.training.restore import load_model
from polyformer.training.tasks import ImageClassification, ImageClassificationConfig, Task

if TYPE_CHECKING:
    from polyformer.training.recipes.reader import Writer


STEPS = "steps"  # in run.json after the end of training

T = TypeVar("T", bound=Task)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run in `folder`; its parts are read on first access."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Return the run in `folder`; raise `InputError` if there is none."""
        folder = checked_path(folder)
        if not folder.is_dir():
            raise InputError(
                f"{folder}: no such directory; expected a run of `polyformer train` or a checkpoint"
            )
        if not (folder / RECIPE).is_file():
            raise InputError(
                f"{folder}: not a run (it has no {RECIPE}); expected what `polyformer train` wrote"
            )
        return cls(folder)

    def begin(self, recipe: Recipe, tokenizer: Tokenizer | None, model: Transformer, **facts: Any) -> None:
        """Write the inputs of the run, with `facts` for run.json, at the start of training."""
        if not (self.folder / RECIPE).exists():
            if tokenizer is not None:
                tokenizer.save(self.folder)
            write_generation(model, self.folder)
            write_json(self.folder / CONFIG, model.config.to_dict())
        if tokenizer is not None:
            facts[TOKENIZER] = tokenizer_digests(self.folder)
        write_json(self.folder / RECORD, {"seed": recipe.seed, "versions": versions(), **facts})
        atomic_write(self.folder / RECIPE, recipe.to_yaml().encode())  # last: marks a run
        for part in ("recipe", "task"):  # a resumed run has read them already, and they may have changed
            vars(self).pop(part, None)

    def record(self, **facts: Any) -> None:
        """Add entries to run.json."""
        write_json(self.folder / RECORD, {**self.facts, **facts})

    @property
    def facts(self) -> dict[str, Any]:
        """Return the content of run.json."""
        file = self.folder / RECORD
        if not file.exists():
            return {}
        # Perplexities may be infinite.
        return parse_json(read_bounded(file, JSON_BYTES), file, dict, finite=False)

    @property
    def finished(self) -> bool:
        """Return whether the last training has ended, so that the folder contains its final weights."""
        file = self.folder / RECORD
        weights = is_adapted(self.folder) or (self.folder / WEIGHTS).is_file()
        return weights and (not file.exists() or STEPS in self.facts)

    @cached_property
    def recipe(self) -> Recipe:
        """Return the recipe in the folder; raise `InputError` that names the file if it is damaged."""
        path = self.folder / RECIPE
        try:
            return Recipe.from_yaml(read_bounded(path, YAML_BYTES).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: damaged ({error})") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the run."""
        return load_tokenizer(self.folder)

    @cached_property
    def task(self) -> Task:
        """Return the task of the recipe, without data."""
        return self.recipe.task.build(self.tokenizer if self.recipe.task.tokenized else None)

    def task_of(self, kind: type[T]) -> T:
        """Return the task if it is of `kind`; raise `InputError` otherwise."""
        if not isinstance(self.task, kind):
            raise InputError(
                f"{self.folder}: a run of the task {quote(self.recipe.task.kind)}, which cannot do this"
            )
        return self.task

    def measured(self, device: str = "auto") -> nn.Module:
        """Return the module for the metrics: the model, with its auxiliary models if there are any."""
        if not self.finished:
            return self._unfinished(device)[1]
        return self.task.objective.training_module(self.model(device), self.folder)

    def model(self, device: str = "auto") -> Transformer:
        """Return the trained model; for an unfinished run, the model of its last checkpoint."""
        if not self.finished:
            return self._unfinished(device)[0]
        load: Any = from_pretrained if is_adapted(self.folder) else load_pretrained
        model = load(self.folder).to(choose_device(device))
        return model

    def result(self, device: str = "auto") -> Transformer:
        """Return the model of a finished run; raise `InputError` if it is unfinished and may change."""
        if not self.finished:
            way = f"resume with: polyformer train --resume {self.folder}"
            raise InputError(
                f"{self.folder}: this run has not ended, so nothing can learn from it yet; {way}"
            )
        return self.model(device)

    def _unfinished(self, device: str) -> tuple[Transformer, nn.Module]:
        """Return the model of the last checkpoint, and the module that is measured."""
        latest = Checkpoints(self.folder).latest()
        if latest is None:
            way = f"resume with: polyformer train --resume {self.folder}"
            raise InputError(f"{self.folder}: this run has no checkpoint yet; {way}")
        place = choose_device(device)
        tuned = self.recipe.tuning is not None  # then all values come from a checkpoint
        with torch.device("meta" if tuned else "cpu"):
            model: Any = build_model(read_config(self.folder))
        if self.recipe.tuning is not None:
            start_from(str(self.recipe.model.pretrained), model)
            self.recipe.tuning.prepare(model)
        joined = self.task.objective.training_module(model)
        load_model(latest, joined)
        model.generation = read_generation(self.folder)
        model.labels = tuple(getattr(self.task, "labels", ()))
        print(f"{self.folder} has not ended: this is its step {step_of(latest)}", file=sys.stderr)
        joined.to(place).eval()
        return model.eval(), joined


def writer(folder: str | Path, kind: type[T], device: str = "auto") -> "tuple[T | Writer, Transformer]":
    """Return the writer for the task `kind` and the model in `folder`, a run or a checkpoint."""
    from polyformer.training.recipes.reader import Writer

    if is_checkpoint(folder):
        loaded = Writer(Path(folder), kind.command, choose_device(device))
        return loaded, loaded.model
    run = Run.open(folder)
    return run.task_of(kind), run.model(device)


def is_checkpoint(path: str | Path) -> bool:
    """Return whether `path` is a GGUF file, or a folder that is not a run."""
    folder = checked_path(path)
    return gguf_file(folder) is not None or (folder.is_dir() and not (folder / RECIPE).is_file())


def open_model(path: str | Path, device: str = "auto", head: Any = None) -> Any:
    """Return the model in `path`: a run, the folder of a checkpoint, a GGUF file or the folder of one.

    head: another head for a checkpoint, see `from_pretrained`. Raises `InputError` if there is no model.
    """
    if is_checkpoint(path):
        return from_pretrained(path, head).to(choose_device(device))
    return Run.open(path).model(device)


def new_folder(name: str, root: str | Path = "runs") -> Path:
    """Create and return a new folder ROOT/NAME-NUMBER."""
    number = 1
    while True:
        folder = Path(root, f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InputError(
                f"cannot write {folder}: {error.strerror}; choose another place with --out"
            ) from error
        else:
            return folder


DATA = "data"  # the fingerprint of the data in run.json
TOKENIZER = "tokenizer"  # the digests of its files in run.json
FIXED = "seed", "model", "task", "tokenizer", "vectors", "distillation", "tuning"
PLACES = {"path", "validation", "test"}


def check_same_recipe(run: Run, recipe: Recipe) -> None:
    """Raise `InputError` if `recipe` cannot continue `run`.

    The model, the task, the tokenizer, the kind of optimizer, the seed and the reading of data must not
    change. The length, speed and device of training, and the paths of the data, may change.
    """
    before, now = _fixed(run.recipe), _fixed(recipe)
    if before["model"] != now["model"] and run.recipe.model.config() == recipe.model.config():
        now["model"] = before["model"]
    different = first_difference(before, now)
    if different:
        name, old, new = different
        way = f" --pretrained {run.folder} (with the weights of this one)" if run.finished else ""
        raise InputError(
            f"--resume {run.folder}: {name} is {quote(old)} there, got {quote(new)}; leave it as it is, or "
            f"begin another run: polyformer train RECIPE{way} --out NEW"
        )


def check_data(run: Run, now: Fingerprint) -> None:
    """Raise `InputError` if the data or the tokenizer differ from those that `run` was trained with."""
    _check_tokenizer(run)
    changes = data_changes(run.facts.get(DATA, {}), now)
    if changes:
        raise InputError(
            f"data: changed since {run.folder} began: {'; '.join(changes[:3])}"
            f"{f'; and {len(changes) - 3} more' if len(changes) > 3 else ''}; put them back, or resume with "
            f"them as they are: polyformer train --resume {run.folder} --changed-data"
        )


def tokenizer_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in the folder of a run that decides the ids of a text."""
    names = "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", *PIECE_FILES
    files = [folder / name for name in names if (folder / name).is_file()]
    return {file.name: of_file(file)["sha256"] for file in files}


def _check_tokenizer(run: Run) -> None:
    """Raise `InputError` if the tokenizer's files changed since `run` began."""
    before, now = run.facts.get(TOKENIZER), tokenizer_digests(run.folder)
    if before is not None and before != now:
        names = ", ".join(name for name in {**before, **now} if before.get(name) != now.get(name))
        raise InputError(
            f"tokenizer: {names} in {run.folder} changed since the run began, so the same texts have other "
            f"tokens; put it back, or resume with it as it is: polyformer train --resume {run.folder} "
            "--changed-data"
        )


def first_difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted name and both values of the first difference between two nested mappings."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None if before == now else (name, before, now)
    for key in dict.fromkeys([*before, *now]):
        different = first_difference(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        if different:
            return different
    return None


def _fixed(recipe: Recipe) -> dict[str, Any]:
    """Return the parts of a recipe that must not change."""
    plain = recipe.to_dict()
    fixed = {name: plain[name] for name in FIXED}
    if fixed["task"].get("neighbours"):
        fixed["task"]["neighbours"] = "where they lie may change"
    reading = {name: value for name, value in plain[DATA].items() if name not in PLACES}
    return {**fixed, "optimizer": {"kind": plain["optimizer"]["kind"]}, DATA: reading}


def folder_of(out: str | Path, resume: bool) -> Run:
    """Return the run in `out` to resume, or a new run; raise `InputError` if `resume` does not fit."""
    if resume:
        return Run.open(out)
    run = Run(Path(out))
    if (run.folder / RECIPE).exists():
        way = f"continue it with --resume {run.folder}, or choose another --out"
        raise InputError(f"{run.folder} already holds a run; {way}")
    return run


def image_classifier(folder: str | Path, device: str = "auto") -> tuple[ImageClassification, Any] | None:
    """Return the task and the model in `folder`, or None if it is not an image classifier."""
    folder = Path(folder)
    if (folder / RECIPE).is_file():
        run = Run.open(folder)
        if not isinstance(run.recipe.task, ImageClassificationConfig):
            return None
        return run.task_of(ImageClassification), run.model(device)
    config: Any = config_of(folder) if is_checkpoint(folder) else None
    if not isinstance(config, VisionConfig):
        return None
    model = open_model(folder, device)
    return task_of(model), model


def task_of(model: Any) -> ImageClassification:
    """Return the task that reads images like the model of a checkpoint."""
    config: VisionConfig = model.config
    each = config.num_channels
    return ImageClassificationConfig(
        labels=label_names(model),
        image_size=config.image_size,
        channels=each,
        mean=config.mean * (each // len(config.mean)),
        std=config.std * (each // len(config.std)),
    ).build()


def brought(task: ImageClassification) -> DataConfig:
    """Return the data options that convert images to the size and the colour mode of `task`."""
    mode = "grey" if task.config.channels == 1 else "rgb"
    return DataConfig(image_size=task.rows.size, image_mode=mode, streaming=True)
