"""Recipes: all settings of a training run, by name or by file, and the paths of their data."""

import dataclasses
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from polyformer.attention.patterns.base import Pattern
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_bounded
from polyformer.core.parsing import first_name, parse_yaml, with_options
from polyformer.core.ranges import YAML_BYTES, NonNegativeInt
from polyformer.core.registry import register_names, unknown_name
from polyformer.data import DataConfig, TokenizerConfig
from polyformer.data.episodes import PREFIX
from polyformer.data.prepared import is_prepared
from polyformer.data.sources.files import is_remote, plain_name
from polyformer.data.sources.libraries import LIBRARY
from polyformer.data.sources.origins import are_files, is_source
from polyformer.models.architectures import VisionConfig, decode_config
from polyformer.models.checkpoints import config_of, keep_positions
from polyformer.models.config import ModelConfig
from polyformer.models.plugins import add_missing_imports
from polyformer.models.presets import model_config, overridden
from polyformer.nn.stack import AttentionConfig
from polyformer.training import OptimizerConfig, ScheduleConfig, TrainingConfig
from polyformer.training.config import flattened
from polyformer.training.objectives import DistillationConfig
from polyformer.training.optimizers import AdamW, Cosine
from polyformer.training.tasks import LanguageModellingConfig, TaskConfig
from polyformer.training.tuning import TuningConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorsConfig(Config):
    """A file of word2vec or GloVe vectors; `frozen`: the token table is not trained."""

    path: str
    frozen: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelChoice(Config):
    """A preset with changed options, written as one mapping, or only the name of the preset:

        model: {preset: decoder-tiny, hidden_size: 192, decoder: {dropout: 0.2}}

    A top-level option is set wherever the model has it, a nested option only at its position. `pretrained:
    DIR` instead of the preset starts from a checkpoint of polyformer or transformers. Without both, the
    mapping is a complete `ModelConfig`.
    """

    preset: str | None = None
    pretrained: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Parse the name of a preset, or a mapping of `preset` or `pretrained` and options."""
        if isinstance(data, str):
            return cls(preset=data)
        if not isinstance(data, dict):
            raise InputError(
                f"{where or 'model'}: expected the name of a preset or a mapping, got {quote(data)}"
            )
        options = dict(data)
        bases = {name: options.pop(name, None) for name in ("preset", "pretrained")}
        for name, base in bases.items():
            if not isinstance(base, str | None):
                what = "the name of a preset" if name == "preset" else "a directory"
                raise InputError(f"{where or 'model'}.{name}: expected {what}, got {quote(base)}")
        if all(bases.values()):
            raise InputError(f"{where or 'model'}: expected a preset or a pretrained checkpoint, got both")
        return cls(**bases, options=options)

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that `from_dict` reads."""
        bases = {"preset": self.preset, "pretrained": self.pretrained}
        return {**{name: base for name, base in bases.items() if base is not None}, **self.options}

    def config(self) -> Any:
        """Return the model configuration; raise `InputError`, with similar names, for unknown names."""
        if self.pretrained is not None:
            checkpoint: Any = config_of(self.pretrained)
            if isinstance(checkpoint, VisionConfig):
                return overridden(checkpoint, flattened(self.options))
            if not isinstance(checkpoint, ModelConfig):
                raise InputError(
                    f"pretrained: {self.pretrained} reads neither text nor images, and such a model is "
                    "trained from fresh weights only; name a preset"
                )
            return keep_positions(overridden(checkpoint, flattened(self.options)), checkpoint)
        if self.preset is None:
            config: Any = decode_config(self.options, "model")
            return config
        return model_config(self.preset, flattened(self.options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """A training run."""

    task: TaskConfig = LanguageModellingConfig()
    model: ModelChoice = ModelChoice(preset="decoder-tiny")
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    optimizer: OptimizerConfig = AdamW()
    schedule: ScheduleConfig = Cosine()
    training: TrainingConfig = TrainingConfig()
    vectors: VectorsConfig | None = None  # pretrained word vectors of the token table
    distillation: DistillationConfig | None = None  # a teacher that provides initial layers and soft labels
    tuning: TuningConfig | None = None  # new weights that are trained instead of the model's
    imports: tuple[str, ...] = ()  # files and modules that register user-defined parts
    seed: NonNegativeInt = 0

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Return the recipe described by `data`. It imports nothing: see `polyformer.models.plugins`.

        A model that starts from a checkpoint uses the tokenizer of the checkpoint unless another is named.
        Options of a part without its kind, as in `optimizer: {lr: 3e-3}`, belong to the default kind.
        """
        data = _with_default_kinds(cls, data)
        names = data.get("imports") if isinstance(data, dict) else None
        if isinstance(data, dict) and "tokenizer" not in data:
            model = data.get("model")
            checkpoint = model.get("pretrained") if isinstance(model, dict) else None
            data = data if checkpoint is None else {**data, "tokenizer": {"path": checkpoint}}
        with add_missing_imports(
            [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        ):
            return super().from_dict(data, where)

    def model_config(self) -> ModelConfig:
        """Return `ModelChoice.config`; an error mentions missing imports."""
        with add_missing_imports(self.imports):
            return self.model.config()

    def __post_init__(self) -> None:
        if self.vectors is not None and (self.model.pretrained or self.distillation):
            raise InputError(
                "vectors: a checkpoint and a teacher bring token vectors of their own; leave them out"
            )
        if self.tuning is not None and (self.model.pretrained is None or self.distillation):
            raise InputError("tuning: it changes a trained model; name a checkpoint, with --pretrained MODEL")
        if self.tuning is not None and not self.training.engine.parallel.whole:
            raise InputError(
                "tuning: every process needs the whole model; leave out training.engine.parallel"
            )


def _with_default_kinds(recipe: type[Recipe], data: object) -> object:
    """Return `data` with the kind of the default in each part that has options but no kind."""
    if not isinstance(data, dict):
        return data
    kinds = {
        field.name: field.default.kind
        for field in dataclasses.fields(recipe)
        if isinstance(field.default, Config) and field.default.kind
    }
    return {
        name: {"kind": kinds[name], **part} if name in kinds and isinstance(part, dict) else part
        for name, part in data.items()
    }


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated recursively with `changes`. A change of `kind` replaces the whole part."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        if isinstance(old, str) and isinstance(value, dict) and "kind" not in value:
            old = _written_out(name, old, value)
        if (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            result[name] = merged(old, value)
        else:
            result[name] = value
    return result


def _written_out(name: str, text: str, change: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping that `text`, the name of a preset or an expression, abbreviates."""
    if name == "model":
        return {"preset": text}
    heads = {field.name for field in dataclasses.fields(AttentionConfig)}
    is_pattern = first_name(text) in Pattern.registry
    if name == "attention" and (is_pattern or heads & change.keys()):
        return {"mechanism": text}
    return {"pattern": text} if is_pattern else with_options(text, name)


def nested(path: str, value: object) -> dict[str, Any]:
    """Convert ("a.b", 1) to {a: {b: 1}}."""
    name, _, rest = path.partition(".")
    return {name: nested(rest, value) if rest else value}


def with_changes(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with options by dotted names, in their order."""
    for name, value in changes.items():
        base = merged(base, nested(name, value))
    return base


SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package."""
    folder = files("polyformer.training.recipes")
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(SUFFIXES[0]))


register_names("recipe", lambda: dict.fromkeys(recipe_names(), ""), "polyformer train {name}")


def recipe_text(name: str) -> str:
    """Return the YAML text of the recipe `name`, or of the file of this name."""
    if name.endswith(SUFFIXES):
        try:
            return read_bounded(name, YAML_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"cannot read {name}: {error}") from error
    if name not in recipe_names():
        raise unknown_name("recipe", name, recipe_names())
    return (files("polyformer.training.recipes") / f"{name}{SUFFIXES[0]}").read_text(encoding="utf-8")


def find_recipe(name: str, pretrained: bool = False) -> dict[str, Any]:
    """Return the recipe `name` (in the package, or a .yaml file) as plain data, not yet checked.

    The entry `pretrained` of a recipe contains changes for a model that starts from a checkpoint. In this
    case the entry `model` is replaced by the options of `pretrained` for the model of the checkpoint.
    """
    data = _complete(name)
    changes = data.pop("pretrained", {})
    if not isinstance(changes, dict):
        raise InputError(f"{name}: pretrained: expected a mapping of changes, got {quote(changes)}")
    if not pretrained:
        return data
    data.pop("model", None)
    return merged(data, changes)


def _complete(name: str) -> dict[str, Any]:
    """Return the recipe `name` on top of the recipe of the package that its entry `extends` names, if any."""
    data = parse_yaml(recipe_text(name), name)
    if not isinstance(data, dict):
        raise InputError(
            f"{name}: expected a recipe, a mapping of task, model, data and so on, got {quote(data)}"
        )
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str) or base not in recipe_names():
        raise InputError(f"{name}: extends: {unknown_name('recipe', base, recipe_names())}")
    return merged(_complete(base), data)


def with_data(data: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the `data` part of a recipe, reading from `path`.

    In a directory, the files named by the recipe are looked up, gzipped or not. Anything else, such as a
    directory with a folder per label, replaces all of them as the source of training data.
    """
    names, folder = named_files(data), Path(path)
    if names and folder.is_dir() and not is_prepared(path):
        inside = {role: _in_folder(folder, name) for role, name in names.items()}
        if all(map(are_files, inside.values())) or not is_source(folder):
            return {**data, **inside}
    replaced = {*names}
    # Parts of one table, told apart by the column `split`, stay parts of one table.
    parts = [role for role, name in names.items() if data.get("split") and name == names["path"]]
    if names and _suffix(path) != _suffix(names["path"]):
        replaced |= {"format", "header"}  # they describe the original files of the recipe
    kept = {key: value for key, value in data.items() if key not in replaced}
    return {**kept, **dict.fromkeys(parts, path), "path": path}


def absolute(data: dict[str, Any]) -> dict[str, Any]:
    """Return the same data options with absolute paths."""
    elsewhere = lambda name: name.startswith(("hub:", PREFIX)) or is_remote(name)  # noqa: E731
    paths = {role: name for role, name in named_files(data).items() if not elsewhere(name)}
    return {**data, **{role: str(Path(name).absolute()) for role, name in paths.items()}}


def named_files(data: dict[str, Any]) -> dict[str, str]:
    """Return the sources that a recipe names, except the text included with Python.

    Raises `InputError` for a source that is not a string, or `data` that is not a mapping.
    """
    if not isinstance(data, dict):
        raise InputError(f"data: expected a mapping with a path, got {quote(data)}")
    names = {role: data[role] for role in ("path", "validation", "test") if data.get(role)}
    for role, name in names.items():
        if not isinstance(name, str):
            raise InputError(
                f"data.{role}: expected one source, got {quote(name)}; for several files a pattern, 'a/*.txt'"
            )
    return {role: name for role, name in names.items() if name != LIBRARY}


def _in_folder(folder: Path, name: str) -> str:
    name = Path(name).name if Path(name).is_absolute() else name  # from the recipe of a run
    other = name.removesuffix(".gz") if name.endswith(".gz") else f"{name}.gz"
    for candidate in (name, other):
        if are_files(str(folder / candidate)):
            return str(folder / candidate)
    return str(folder / name)  # the reader raises an error for the missing file


def _suffix(path: str) -> str:
    return Path(plain_name(path)).suffix
