"""`from_pretrained`: a model of a directory or of a name on the hub."""

import dataclasses
import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.config_mapping import Tree
from polyformer.checkpoints.convert import keep_scores
from polyformer.checkpoints.family import FAMILIES, Family
from polyformer.checkpoints.gguf_tensors import GgufTensors, open_gguf
from polyformer.checkpoints.matching import Matched, Stored, match_tensors, resolve_prefix
from polyformer.checkpoints.sentence import embedding_head
from polyformer.checkpoints.tensors import open_tensors
from polyformer.checkpoints.transfer import Report, transfer
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_json
from polyformer.core.gguf import gguf_file
from polyformer.core.hub_names import check_no_revision, fetched
from polyformer.core.unused_tensors import read_unused_tensors
from polyformer.core.weights import check_layers, load_weights
from polyformer.heads import HeadConfig
from polyformer.model import Transformer, decode_config, load_pretrained
from polyformer.model.kinds import MARKS
from polyformer.model.saving import CONFIG, read_generation
from polyformer.model.weights import WEIGHTS, check_trainable, with_weights

WRAPPED = "polyformer"
"""The model_type of our models inside transformers."""


def from_pretrained(
    source: str | Path,
    head: str | dict[str, Any] | HeadConfig | None = None,
    *,
    weights: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    revision: str | None = None,
) -> Transformer:
    """A model and its weights, in evaluation mode.

    Args:
        source: a directory that `save_pretrained` or transformers wrote, a GGUF file or the directory of one,
            or the name of a directory on the hub, which is fetched (a directory needs no network);
            "owner/name@revision" pins what it means.
        head: which head of a public checkpoint: transformers' class ("BertForMaskedLM"), its end, our kind
            ("masked"), or a configuration, written in any way ("classify(num_labels=3)", {"kind": "embed"});
            by default the one that it was saved with. "embed" of a folder of sentence-transformers pools as
            that says. A head that the files do not hold is newly initialized, with a warning.
        weights: what they are kept in: "float32", "bfloat16", or "int8", a fourth of the memory and faster to
            generate with (`polyformer.model.weights`); by default as in the files.
        dtype: of what is floating point; by default as in the files, of GGUF float32.
        allow_pickle: read `pytorch_model.bin` where there is no safetensors, as tensors alone.
        revision: of a name on the hub: a commit, a tag or a branch; by default the newest.

    Raises:
        InputError: a path that is no model's directory, an unknown family, an unsupported option,
            tensors that are missing, unexpected, misshapen or damaged.
    """
    if weights is not None and weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    folder = _folder(source, revision)
    model = _read(folder, head, dtype, allow_pickle)
    model = model if weights is None else with_weights(model, weights).to(dtype)
    model.folder = folder
    return model


def _read(
    folder: Path,
    head: str | dict[str, Any] | HeadConfig | None,
    dtype: torch.dtype | None,
    allow_pickle: bool,
) -> Transformer:
    saved, stored = _described(folder, dtype)
    if MARKS.keys() & saved.keys() and head is None:
        other: Any = load_pretrained(folder).to(dtype)
        return other
    if saved.get("model_type", WRAPPED) == WRAPPED:
        if head is not None:
            raise InputError("head: this is a polyformer with a head of its own; leave it out")
        return _load_own(folder, saved).to(dtype)
    model, matched = _load_public(folder, saved, head, dtype, allow_pickle, stored)
    _warn(matched.newly_initialized, 4)
    return model


def _load_public(
    folder: Path,
    hub: Tree,
    head: str | dict[str, Any] | HeadConfig | None,
    dtype: torch.dtype | None,
    pickle: bool,
    stored: GgufTensors | None = None,
) -> tuple[Transformer, Matched]:
    """The model of a public checkpoint's folder or file, and what became of its tensors."""
    family_of(hub)
    head = named_head(head)
    if head == "embed":
        head = embedding_head(folder) or head
    if stored is not None:
        with _named(folder):
            return model_of_tensors(hub, stored, head, dtype)
    model, matched = model_of_tensors(hub, open_tensors(folder, pickle), head, dtype)
    settings = read_generation(folder)
    model.generation = model.generation if settings is None else settings
    return model, matched


def _described(path: Path, dtype: torch.dtype | None = None) -> tuple[Tree, GgufTensors | None]:
    """The configuration of a folder or a GGUF file, and of a file its tensors."""
    return open_gguf(path, dtype) if path.is_file() else (read_json(path / CONFIG, dict), None)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Lets errors name the file whose configuration they speak of."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("config.json", str(path))) from error


def _warn(new: tuple[str, ...], stacklevel: int = 3) -> None:
    if new:
        warnings.warn(f"not in the checkpoint, newly initialized: {', '.join(new)}", stacklevel=stacklevel)


def _load_own(folder: Path, saved: Tree) -> Transformer:
    """A model in our format, or wrapped for transformers (`polyformer.hub`)."""
    if "model_type" not in saved:
        return Transformer.from_pretrained(folder)
    config, stored = ModelConfig.from_dict(saved.get("polyformer")), open_tensors(folder)
    check_layers(config, len([*stored]), folder)
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, {name.removeprefix("model."): stored[name] for name in stored}, folder)
    model.generation, model.unused_tensors = read_generation(folder), read_unused_tensors(folder)
    return model.eval()


def config_of(source: str | Path) -> ModelConfig:
    """The configuration of a checkpoint, with the head that it was saved with."""
    path = _folder(source)
    saved, _ = _described(path)
    if saved.get("model_type", WRAPPED) == WRAPPED:
        config: Any = decode_config(saved.get("polyformer", saved))
        return config
    family = family_of(saved)
    if path.is_file():
        with _named(path):
            return family.config(saved, family.task(saved, None))
    return family.config(saved, family.task(saved, None))


def family_of(hub: Tree) -> Family:
    """The family of a public configuration; `InputError` for one that is not supported."""
    name = hub.get("model_type")
    if not isinstance(name, str) or name not in list(FAMILIES):
        near = difflib.get_close_matches(str(name)[:50], list(FAMILIES), n=2)
        code = ", and the code beside it (auto_map) is never run" if hub.get("auto_map") else ""
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise InputError(
            f"config.json: model_type {quote(name)} is not supported{code}; {hint}"
            f"supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def start_from(source: str | Path, model: Transformer) -> Report:
    """Fill `model` with what a checkpoint has of it; the report says what was copied and what was not.

    Raises `InputError` for a table of other tokens than the model's.
    """
    folder = _folder(source)
    saved, stored = _described(folder)
    new: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    if saved.get("model_type", WRAPPED) == WRAPPED:
        old = from_pretrained(folder)
        check_trainable(old)
    else:
        kinds = {task.head.kind for task in family_of(saved).tasks.values()}
        head = model.config.head if model.config.head.kind in kinds else None
        old, matched = _load_public(folder, saved, head, None, False, stored)
        new, left = matched.newly_initialized, matched.left
    report = keep_scores(old, model, transfer(old, model, new))
    report = dataclasses.replace(report, left=tuple(sorted({*report.left, *left})))
    if not any(name.startswith("tokens.") for name in report.copied):
        own, stored = model.config.vocab_size, old.config.vocab_size
        raise InputError(
            f"{source}: it has {stored} tokens, the tokenizer {own}; use --tokenizer.path {source}"
        )
    return report


def from_transformers(model: nn.Module, head: str | dict[str, Any] | HeadConfig | None = None) -> Transformer:
    """Ours of a model of transformers in memory, in evaluation mode; weights that lie alike are shared.

    Raises `InputError` as `from_pretrained` does.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise InputError(f"model: expected one of transformers', got {type(model).__name__}")
    hub = {**config.to_dict(), "architectures": [type(model).__name__]}
    if (hub.get("quantization_config") or {}).get("quant_method") == "gguf":
        del hub["quantization_config"]  # such files are dequantized when they are read
    converted, matched = model_of_tensors(hub, dict(model.state_dict()), named_head(head))
    _warn(matched.newly_initialized)
    return converted


def model_of_tensors(
    hub: Tree,
    stored: Stored,
    head: str | HeadConfig | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Transformer, Matched]:
    """The model of a public configuration and its tensors, and what became of them."""
    family = family_of(hub)
    task = family.task(hub, head)
    config = family.config(hub, task, head if isinstance(head, HeadConfig) else None)
    config = untied(family, task, config, stored)
    check_layers(config, len([*stored]), "the checkpoint")
    with torch.device("meta"):
        model = family.model(config)
    matched = match_tensors(family, task, config, stored, model, new_head=head is not None)
    load_weights(model, _cast(matched.weights, dtype), "the checkpoint")
    model.unused_tensors = _cast(matched.unused, dtype)
    if isinstance(hub.get("eos_token_id"), list):  # of which a model's own configuration holds one
        model.generation = {"eos_token_id": hub["eos_token_id"]}
    return model.eval(), matched


def named_head(head: str | dict[str, Any] | HeadConfig | None) -> str | HeadConfig | None:
    """A head's configuration, or its name alone, which the family resolves."""
    if isinstance(head, dict) and head.keys() == {"kind"} and isinstance(head["kind"], str):
        return head["kind"]
    if head is None or (isinstance(head, str) and "(" not in head):
        return head
    return HeadConfig.from_dict(head, "head")


def untied(family: Family, task: str, config: ModelConfig, stored: Stored) -> ModelConfig:
    """The configuration, untied where the files have an output layer that differs from the token table.

    What transformers saves of T5 1.1 says that both are tied, and they are not; it believes the files too.
    """
    mapping = family.full_key_mapping(task)
    for copy, source in family.tasks[task].tied_keys.items() if family.tied(config) else ():
        keys = {resolve_prefix(key, family.prefixes, {copy, source}): key for key in stored}
        known = copy in mapping or copy.removesuffix(".weight") in mapping
        both = known and copy in keys and source in keys
        if both and not torch.equal(stored[keys[copy]], stored[keys[source]]):
            return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tied=False))
    return config


def _cast(weights: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype is None:
        return weights
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in weights.items()}


def _folder(source: str | Path, revision: str | None = None) -> Path:
    folder = Path(source)
    if folder.exists():
        check_no_revision(source, revision)
        file = gguf_file(folder)
        if file is not None:
            return file
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder}: not a model directory (it has no {CONFIG})")
        return folder
    if folder.is_file():
        raise InputError(
            f"{folder}: this is a file; expected a directory with {CONFIG} and model.safetensors, as "
            "save_pretrained writes it, transformers' or ours, or a GGUF file (.gguf)"
        )
    if isinstance(source, Path) or source.count("/") > 1 or source.startswith((".", "/")):
        raise InputError(f"no such directory: {source}")
    return fetched(source, revision)
