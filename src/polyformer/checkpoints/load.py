"""`from_pretrained`: a directory, or a name on the hub, made into a model."""

import dataclasses
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.convert import Report, transfer
from polyformer.checkpoints.family import FAMILIES, Family
from polyformer.checkpoints.fields import Tree
from polyformer.checkpoints.tensors import Tensors, open_tensors
from polyformer.core.errors import InputError, unknown
from polyformer.core.files import read_json
from polyformer.core.initialization import initialize
from polyformer.core.weights import load_weights
from polyformer.heads import HeadConfig
from polyformer.model import CONFIG, Transformer, read_generation
from polyformer.trajectory import TrajectoryTransformer

WRAPPED = "polyformer"
"""The model_type of our models inside transformers."""

TRAJECTORY = "max_timesteps"
"""The option by which a configuration in our format is known as that of a `TrajectoryTransformer`."""

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


def from_pretrained(source: str | Path, head: str | dict[str, Any] | HeadConfig | None = None, *,
                    dtype: torch.dtype | None = None, allow_pickle: bool = False) -> Transformer:  # fmt: skip
    """A model and its weights, in evaluation mode.

    Args:
        source: a directory that `save_pretrained` or transformers wrote, or the name of one on the hub, which
            is fetched (a directory needs no network).
        head: which head of a public checkpoint: transformers' class ("BertForMaskedLM"), its end, our kind
            ("masked"), or a configuration, written in any way ("classify(num_labels=3)", {"kind": "embed"});
            by default the one that it was saved with. A head that the files do not hold starts fresh, with a
            warning.
        dtype: of the weights; by default as in the files.
        allow_pickle: read `pytorch_model.bin` where there is no safetensors, as tensors alone.

    Raises:
        InputError: a directory that is none, an unknown family, an option that is not supported, tensors that
            are missing, unexpected, misshapen or damaged.
    """
    folder = _folder(source)
    described = read_json(folder / CONFIG, dict)
    if TRAJECTORY in described and head is None:
        trajectories: Any = TrajectoryTransformer.from_pretrained(folder).to(dtype)
        return trajectories
    if described.get("model_type", WRAPPED) == WRAPPED:
        if head is not None:
            raise InputError("head: this is a polyformer with a head of its own; leave it out")
        return _own(folder, described).to(dtype)
    model = adopt(described, open_tensors(folder, allow_pickle), head, dtype)
    model.generation = read_generation(folder)
    return model


def _own(folder: Path, described: Tree) -> Transformer:
    """A model in our format, or wrapped for transformers (`polyformer.hub`)."""
    if "model_type" not in described:
        return Transformer.from_pretrained(folder)
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(described["polyformer"]))
    given = open_tensors(folder)
    load_weights(model, {name.removeprefix("model."): given[name] for name in given}, folder)
    model.generation = read_generation(folder)
    return model.eval()


def config_of(source: str | Path) -> ModelConfig:
    """The configuration of a checkpoint, with the head that it was saved with."""
    described = read_json(_folder(source) / CONFIG, dict)
    if described.get("model_type", WRAPPED) == WRAPPED:
        return ModelConfig.from_dict(described.get("polyformer", described))
    family = FAMILIES[described["model_type"]]
    return family.config(described, family.task(described, None))


def start_from(source: str | Path, model: Transformer) -> Report:
    """Fill `model` with what a checkpoint has of it; says what was copied and what stays fresh.

    Raises `InputError` for a table of other tokens than the model's.
    """
    described, head = read_json(_folder(source) / CONFIG, dict), None
    if described.get("model_type", WRAPPED) != WRAPPED:
        kinds = {one.head.kind for one in FAMILIES[described["model_type"]].tasks.values()}
        head = model.config.head if model.config.head.kind in kinds else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what starts fresh is in the report
        old = from_pretrained(source, head)
    report = transfer(old, model)
    if "tokens.weight" not in report.copied:
        own, given = (len(one.tokens.weight) for one in (model, old))
        raise InputError(
            f"{source}: it has {given} tokens, the tokenizer {own}; use --tokenizer.path {source}"
        )
    return report


def from_transformers(model: nn.Module, head: str | dict[str, Any] | HeadConfig | None = None) -> Transformer:
    """Ours of a model of transformers in memory, in evaluation mode; weights that lie alike are shared.

    Raises `InputError` as `from_pretrained` does.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise InputError(f"model: expected one of transformers', got {type(model).__name__}")
    described = {**config.to_dict(), "architectures": [type(model).__name__]}
    return adopt(described, dict(model.state_dict()), head)


def adopt(
    described: Tree,
    given: "Tensors | dict[str, Tensor]",
    head: str | dict[str, Any] | HeadConfig | None = None,
    dtype: torch.dtype | None = None,
) -> Transformer:
    """The model of a public configuration and its tensors."""
    family = FAMILIES[described["model_type"]]
    head = named_head(head)
    task = family.task(described, head)
    config = family.config(described, task, head if isinstance(head, HeadConfig) else None)
    config = untied(family, task, config, given)
    with torch.device("meta"):
        model = family.model(config)
    weights = gather(family, task, config, given, model, fresh_head=head is not None)
    load_weights(model, weights if dtype is None else _cast(weights, dtype), "the checkpoint")
    return model.eval()


def named_head(head: "str | dict[str, Any] | HeadConfig | None") -> str | HeadConfig | None:
    """A head's name alone, which is settled by the family, or the configuration that is meant."""
    if head is None or (isinstance(head, str) and "(" not in head):
        return head
    return HeadConfig.from_dict(head, "head")


def untied(family: Family, task: str, config: ModelConfig,
           given: "Tensors | dict[str, Tensor]") -> ModelConfig:  # fmt: skip
    """The configuration, with an output layer of its own where the files have one beside another token table.

    What transformers saves of T5 1.1 says that both are tied, and they are not; it believes the files too.
    """
    table = family.table(task)
    for copy, of in family.tasks[task].copies.items() if family.tied(config) else ():
        names = {_settled(name, family.base, {copy, of}): name for name in given}
        known = copy in table or copy.removesuffix(".weight") in table
        if known and copy in names and of in names and not torch.equal(given[names[copy]], given[names[of]]):
            return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tied=False))
    return config


def gather(family: Family, task: str, config: ModelConfig, given: "Tensors | dict[str, Tensor]",
           model: nn.Module, fresh_head: bool) -> dict[str, Tensor]:  # fmt: skip
    """Our tensors of theirs. `fresh_head`: those of the head that are missing start fresh."""
    own = model.state_dict(keep_vars=True)
    links = {link.theirs: link for link in family.links(config, task, own)}
    copies = family.tasks[task].copies
    names = {_settled(name, family.base, {*links, *copies}): name for name in given}
    found: dict[str, Tensor] = {}
    missing: list[str] = []
    for theirs, link in links.items():
        stored = next((one for one in (theirs, *_copies(copies, theirs)) if one in names), None)
        if stored is None:
            missing.append(theirs)
            continue
        for name, one in zip(link.part.ours, link.part.split(given[names.pop(stored)])):
            _check_shape(stored, name, one, own[name])
            found[name] = one.contiguous()
    found |= family.made(own)
    for name in names:
        if not family.expects(name):
            raise unknown("tensor in the checkpoint", name, family.table(task))
    left = [name for name in own if name not in found and not _shared(own, name, found)]
    fresh = [name for name in left if fresh_head and name.startswith("head.")]
    if len(fresh) < len(left):
        raise InputError(f"the checkpoint lacks {', '.join(missing[:4]) or 'tensors'} "
                         f"({len(left) - len(fresh)} of the model's tensors in all)")  # fmt: skip
    if fresh:
        warnings.warn(f"not in the checkpoint, started fresh: {', '.join(fresh)}", stacklevel=3)
        made = _fresh_head(config, next(iter(found.values())).dtype)
        found |= {name: made[name] for name in fresh}
    return found


def _settled(name: str, base: str, expected: Collection[str]) -> str:
    """A tensor's name in files of this task, whether its own file has the trunk's prefix or not."""
    candidates = (name, f"{base}.{name}", name.removeprefix(f"{base}."))
    return next((one for one in candidates if one in expected), name)


def _copies(copies: Mapping[str, str], name: str) -> list[str]:
    return [copy for copy, of in copies.items() if of == name]


def _check_shape(theirs: str, name: str, one: Tensor, own: Tensor) -> None:
    if one.shape != own.shape:
        raise InputError(
            f"the checkpoint's {theirs!r} makes {name!r} of shape {tuple(one.shape)}, and config.json of "
            f"shape {tuple(own.shape)}; they are not of one model"
        )


def _shared(own: Mapping[str, Tensor], name: str, found: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is also one of those found, under another name."""
    return any(own[one] is own[name] for one in found)


def _fresh_head(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    holder = nn.Module()
    holder.head = config.head.build(config.head_shape())
    initialize(holder, config.initializer_range)
    return dict(holder.to(dtype).state_dict())


def _cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in weights.items()}


def _folder(source: str | Path) -> Path:
    folder = Path(source)
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder}: not a model directory (it has no {CONFIG})")
        return folder
    if isinstance(source, Path) or source.count("/") > 1 or source.startswith((".", "/")):
        raise InputError(f"no such directory: {source}")
    return _fetched(source)


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{name}: no such directory, and the hub does not give it ({reason})") from error
