"""`from_pretrained`: a model from a directory or from a name on the hub.

Some families of transformers are refused; the error names what they compute and this library does not, and
docs/models.md shows the table.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern
from polyformer.core.errors import InputError, caution, quote, unknown
from polyformer.core.files import read_json
from polyformer.core.foreign_checkpoints import check_no_revision, fetched, gguf_file
from polyformer.core.modules import names_wrong_types
from polyformer.core.paths import checked_path, refuse_links
from polyformer.models.architectures import Transformer, decode_config, load_pretrained
from polyformer.models.architectures.model_types import IDENTIFYING_OPTIONS
from polyformer.models.architectures.pretrained import CONFIG, read_generation, read_labels
from polyformer.models.architectures.transformer import DraftingTransformer
from polyformer.models.architectures.weights import (
    STORED,
    WEIGHTS,
    check_layers,
    check_trainable,
    load_weights,
    read_unused_tensors,
    with_weights,
)
from polyformer.models.checkpoints.adapters import is_adapted, load_adapted
from polyformer.models.checkpoints.attachments import with_attachments
from polyformer.models.checkpoints.config_mapping import Tree
from polyformer.models.checkpoints.convert import convert, with_parts
from polyformer.models.checkpoints.family import FAMILIES, Family
from polyformer.models.checkpoints.folder_files import embedding_head, read_preprocessor
from polyformer.models.checkpoints.gguf import GgufTensors, open_gguf
from polyformer.models.checkpoints.tensors import (
    MatchedTensors,
    Stored,
    match_tensors,
    open_tensors,
    resolve_prefix,
    usual_name,
)
from polyformer.models.checkpoints.transfer import Report, keep_scores, transfer
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import HeadConfig
from polyformer.nn.memory import MemoryConfig

SIGHT = "images within texts"
SOUND = "layers over sound"
LAYER_SCALE = "learned factors of what sub-layers add"

REFUSED: dict[str, str] = {
    "bert-generation": "decoders with cross-attention in the classes of encoders",
    "canine": "characters that are hashed and pooled",
    "codegen": "queries, keys and values in one matrix of four blocks",
    "convbert": "convolutions whose weights depend on the text",
    "dbrx": "projections that are clipped",
    "dinov3_vit": f"rotary positions in two dimensions, and {LAYER_SCALE}",
    "falcon_mamba": "state spaces with a step for each channel (the first Mamba)",
    "flaubert": "XLM's layers in pre-norm order, read from files",
    "fnet": "Fourier transforms instead of attention",
    "fsmt": "vocabularies of source and target that differ",
    "funnel": "layers that pool the text",
    "gemma3": SIGHT,
    "gemma3n_text": "embeddings of each layer and predicted residual streams",
    "granitemoehybrid": "Granite's factors around Mamba-2 layers and experts",
    "hubert": SOUND,
    "jamba": "state spaces with a step for each channel (the first Mamba)",
    "jetmoe": "experts of attention",
    "layoutlm": "positions on a page",
    "layoutlmv3": "positions on a page",
    "lfm2_moe": "experts with a selection bias in LFM2's layers, read from files",
    "llama4_text": "chunks of attention, and scores whose temperature grows with the position",
    "llava": SIGHT,
    "longt5": "blocks of attention with bias tables, and summaries of blocks",
    "luke": "entities next to tokens",
    "mamba": "state spaces with a step for each channel (the first Mamba)",
    "mllama": SIGHT,
    "mobilebert": "bottlenecks around the layers",
    "mra": "an approximation of attention at several resolutions",
    "nemotron": "norms whose weight is stored minus 1 and has a bias",
    "nllb-moe": "experts of an encoder-decoder that are left out by chance",
    "nystromformer": "an approximation of attention by landmarks",
    "olmo": "norms without weights, and projections that are clipped",
    "olmoe": "projections that are clipped, and norms of whole projections with experts, read from files",
    "pegasus_x": "global tokens that are not part of the text",
    "perceiver": "a fixed number of latent vectors that attend to the input",
    "persimmon": "layer norms of each head's queries and keys",
    "phimoe": "a choice of two experts by sampled thresholds",
    "prophetnet": "several streams that predict further tokens",
    "qwen2_vl": SIGHT,
    "qwen3_vl": SIGHT,
    "recurrent_gemma": "real-gated linear recurrences",
    "rembert": "token vectors of other widths before and after the layers",
    "roformer": "rotary positions with a table of sines in files",
    "rwkv": "recurrences with a decay for each channel and mixing of neighbouring tokens",
    "splinter": "scores of questions by marked tokens",
    "squeezebert": "convolutions in groups instead of projections",
    "swin": "windows over images that are shifted and merged",
    "switch_transformers": "experts of an encoder-decoder with a limit of tokens, read from files",
    "umt5": "a table of distances for each layer",
    "wav2vec2": SOUND,
    "whisper": SOUND,
    "yoso": "attention by hashing with Bernoulli samples",
    "xlstm": "memories with exponential gates",
    "zamba2": "attention layers that share weights and read the embeddings again",
}
"""transformers' model_type -> what would be needed; the parts of what is only to be read from files exist."""


# The model_type of our models inside transformers.
WRAPPED = "polyformer"


@names_wrong_types
def from_pretrained(
    source: str | Path,
    head: str | dict[str, Any] | HeadConfig | None = None,
    *,
    weights: str | None = None,
    attention: Pattern | MechanismConfig | str | dict[str, Any] | None = None,
    memory: MemoryConfig | str | dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    revision: str | None = None,
) -> Transformer:
    """Return a model with its weights, in evaluation mode.

    Args:
        source: a directory that `save_pretrained` or transformers wrote, a GGUF file or the directory of a
            GGUF file, or the name of a directory on the hub, which is downloaded (a directory requires no
            network); "owner/name@revision" pins the revision.
        head: the head of a public checkpoint: transformers' class ("BertForMaskedLM"), its end, our kind
            ("masked"), or a configuration, in any form ("classify(num_labels=3)", {"kind": "embed"}); by
            default the saved head. "embed" for a folder of sentence-transformers uses the folder's pooling. A
            head that the files do not contain is newly initialized, with a warning.
        weights: the type of the weights: "float32", "bfloat16", or a type that needs less memory and
            generates faster: "int8", "int4", or "stored", the 4-bit numbers of a GGUF file
            (`polyformer.models.architectures.weights`); by default as in the files, float32 for GGUF.
        attention: another attention, such as "Window(256) | Global(4)", in the forms of `convert`; by default
            as saved.
        memory: a memory for a decoder, such as "sinks(first=4, length=508)"; by default as saved.
        dtype: the type of floating point tensors; by default as in the files, float32 for GGUF.
        allow_pickle: read `pytorch_model.bin` if there is no safetensors file, restricted to tensors.
        revision: the revision of a name on the hub: a commit, a tag or a branch; by default the newest.

    Raises:
        InputError: a path that is no model's directory, an unknown family, an unsupported option,
            tensors that are missing, unexpected, misshapen or damaged.
    """
    if weights is not None and weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    folder = _folder(source, revision)
    model = _read(folder, head, dtype, allow_pickle, in_blocks=weights == STORED)
    model = model if attention is None else convert(model, attention)[0]
    model = model if memory is None else with_parts(model, memory=memory)
    model = model if weights is None else with_weights(model, weights).to(dtype)
    model.folder = folder
    return model


def _read(
    folder: Path,
    head: str | dict[str, Any] | HeadConfig | None,
    dtype: torch.dtype | None,
    allow_pickle: bool,
    in_blocks: bool,
) -> Transformer:
    saved, stored = _read_description(folder, dtype)
    if stored is not None:
        stored = dataclasses.replace(stored, in_blocks=in_blocks)
    # Images, trajectories and policies in our format have no model_type.
    if "model_type" not in saved and IDENTIFYING_OPTIONS.keys() & saved.keys() and head is None:
        other: Any = load_pretrained(folder).to(dtype)
        return other
    if saved.get("model_type", WRAPPED) == WRAPPED:
        if head is not None:
            raise InputError("head: a model in polyformer's format has its own head; leave it out")
        return _load_own(folder, saved).to(dtype)
    model, matched = _load_public(folder, saved, head, dtype, allow_pickle, stored)
    _warn(matched.newly_initialized)
    return model


def _load_public(
    folder: Path,
    hub: Tree,
    head: str | dict[str, Any] | HeadConfig | None,
    dtype: torch.dtype | None,
    pickle: bool,
    stored: GgufTensors | None = None,
) -> tuple[Transformer, MatchedTensors]:
    """Return the model of a public checkpoint's folder or file, and the matching of its tensors."""
    family = family_of(hub)
    head = named_head(head)
    if head == "embed":
        head = embedding_head(folder) or head
    if stored is not None:
        with _errors_name(folder):
            return model_of_tensors(hub, stored, head, dtype)
    hub = {**hub, **read_preprocessor(folder, family.image_options)}
    model, matched = model_of_tensors(hub, open_tensors(folder, pickle), head, dtype)
    settings = read_generation(folder)
    # Generation_config.json takes precedence over config.json.
    model.generation = model.generation if settings is None else settings
    return with_attachments(model, hub), matched


def _read_description(path: Path, dtype: torch.dtype | None = None) -> tuple[Tree, GgufTensors | None]:
    """Return the configuration of a folder or a GGUF file, and for a file its tensors."""
    return open_gguf(path, dtype) if path.is_file() else (read_json(path / CONFIG, dict), None)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Make errors name the file with the configuration."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("config.json", str(path))) from error


def _warn(new: tuple[str, ...]) -> None:
    if new:
        caution(f"not in the checkpoint, newly initialized: {', '.join(new)}")


def _load_own(folder: Path, saved: Tree) -> Transformer:
    """Return a model in our format, or wrapped for transformers (`polyformer.models.transformers`)."""
    if "model_type" not in saved:
        return load_adapted(folder, start_from) if is_adapted(folder) else Transformer.from_pretrained(folder)
    config, stored = ModelConfig.from_dict(saved.get("polyformer")), open_tensors(folder)
    check_layers(config, len([*stored]), folder)
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, {name.removeprefix("model."): stored[name] for name in stored}, folder)
    model.generation, model.unused_tensors = read_generation(folder), read_unused_tensors(folder)
    model.labels = read_labels(folder, saved)
    return model.eval()


def config_of(source: str | Path) -> ModelConfig:
    """Return the configuration of a checkpoint, with its saved head."""
    path = _folder(source)
    saved, _ = _read_description(path)
    if saved.get("model_type", WRAPPED) == WRAPPED:
        config: Any = decode_config(saved.get("polyformer", saved))
        return config
    family = family_of(saved)
    if path.is_file():
        with _errors_name(path):
            return family.config(saved, family.task(saved, None))
    return family.config(saved, family.task(saved, None))


def family_of(hub: Tree) -> Family:
    """Return the family of a public configuration; raises `InputError` for an unsupported family."""
    name = hub.get("model_type")
    if not isinstance(name, str) or name not in list(FAMILIES):
        # The name comes from a file and may have any length.
        near = difflib.get_close_matches(str(name)[:50], list(FAMILIES), n=2)
        code = ", and custom code (auto_map) is never run" if hub.get("auto_map") else ""
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        missing = f": it needs {REFUSED[name]}" if isinstance(name, str) and name in REFUSED else ""
        raise InputError(
            f"config.json: model_type {quote(name)} is not supported{missing}{code}; {hint}"
            f"supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def start_from(source: str | Path, model: Transformer) -> Report:
    """Fill `model` with the matching weights of a checkpoint, and report which weights were copied.

    Raises `InputError` for a table of other tokens than the model's.
    """
    folder = _folder(source)
    saved, stored = _read_description(folder)
    new: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    if saved.get("model_type", WRAPPED) == WRAPPED:
        old = from_pretrained(folder)
        check_trainable(old)
    else:
        kinds = {task.head.kind for task in family_of(saved).tasks.values()}
        # A head of the same kind with other labels is read unchanged, and excluded by `transfer`.
        heads = config_of(folder).head, model.config.head
        labels = [getattr(head, "num_labels", None) for head in heads]
        relabelled = heads[0].kind == heads[1].kind and labels[0] != labels[1]
        head = heads[1] if heads[1].kind in kinds and not relabelled else None
        old, matched = _load_public(folder, saved, head, None, False, stored)
        new, left = matched.newly_initialized, matched.left
    report = keep_scores(old, model, transfer(old, model, new))
    drafts = any(name.startswith("drafting.") for name in report.newly_initialized)
    if drafts and isinstance(model, DraftingTransformer):
        model.start_drafting()
    report = dataclasses.replace(report, left=tuple(sorted({*report.left, *left})))
    reads_tokens = isinstance(model.config, ModelConfig)
    if reads_tokens and not any(name.startswith("tokens.") for name in report.copied):
        own, stored = model.config.vocab_size, old.config.vocab_size
        raise InputError(
            f"{source}: it has {stored} tokens, the tokenizer {own}; use --tokenizer.path {source}"
        )
    return report


def from_transformers(model: nn.Module, head: str | dict[str, Any] | HeadConfig | None = None) -> Transformer:
    """Return our model for a model of transformers in memory, in evaluation mode.

    Weights with the same layout are shared. Raises the same `InputError` as `from_pretrained`.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise InputError(f"model: expected one of transformers', got {type(model).__name__}")
    hub = {**config.to_dict(), "architectures": [type(model).__name__]}
    if (hub.get("quantization_config") or {}).get("quant_method") == "gguf":
        del hub["quantization_config"]  # such files are dequantized on reading
    tensors = names_in_files(model, dict(model.state_dict()))
    converted, matched = model_of_tensors(hub, tensors, named_head(head))
    _warn(matched.newly_initialized)
    return converted


def names_in_files(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model of transformers by the names in its saved files."""
    from transformers import core_model_loading

    named = core_model_loading.revert_weight_conversion(model, tensors)  # type: ignore[arg-type]
    # ESM is saved with the oldest names of norms
    return {usual_name(name): tensor for name, tensor in named.items()}


def model_of_tensors(
    hub: Tree,
    stored: Stored,
    head: str | HeadConfig | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Transformer, MatchedTensors]:
    """Return the model for a public configuration and its tensors, and the matching of the tensors."""
    family = family_of(hub)
    task = family.task(hub, head)
    config = family.config(hub, task, head if isinstance(head, HeadConfig) else None)
    config = untied(family, task, config, stored)
    config = config if head is not None else family.fitted(config, [*stored])
    if isinstance(stored, GgufTensors) and stored.in_blocks:
        config = dataclasses.replace(config, weights=STORED)
    check_layers(config, len([*stored]), "the checkpoint")
    with torch.device("meta"):
        model = family.model(config)
    # The file's tensors are assigned, so there is no second copy of the weights.
    matched = match_tensors(family, task, config, stored, model, new_head=head is not None)
    load_weights(model, _cast(matched.weights, dtype), "the checkpoint")
    model.unused_tensors = _cast(matched.unused, dtype)
    if isinstance(hub.get("eos_token_id"), list):  # our configuration has only a single end token
        model.generation = {"eos_token_id": hub["eos_token_id"]}
    return model.eval(), matched


def named_head(head: str | dict[str, Any] | HeadConfig | None) -> str | HeadConfig | None:
    """Return a head's configuration, or only its name, which the family resolves."""
    if isinstance(head, dict) and head.keys() == {"kind"} and isinstance(head["kind"], str):
        return head["kind"]
    if head is None or (isinstance(head, str) and "(" not in head):
        return head
    return HeadConfig.from_dict(head, "head")


def untied(family: Family, task: str, config: ModelConfig, stored: Stored) -> ModelConfig:
    """Return the configuration, untied if the output layer in the files differs from the token table.

    transformers saves T5 1.1 as tied although it is untied; it also relies on the files.
    """
    mapping = family.full_key_mapping(task)
    for copy, source in family.tasks[task].tied_keys.items() if family.tied(config) else ():
        # Two different tensors in one file: the model is not tied, despite its config.json.
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
    folder = checked_path(source)
    if folder.exists():
        check_no_revision(source, revision)
        file = gguf_file(folder)
        if file is not None:
            refuse_links(folder)
            return file
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder}: not a model directory (it has no {CONFIG})")
        refuse_links(folder)
        return folder
    if folder.is_file():
        raise InputError(
            f"{folder}: expected, instead of a file, a directory with {CONFIG} and model.safetensors, as "
            "written by save_pretrained, or a GGUF file (.gguf)"
        )
    # Only owner/name may be on the hub; other names are paths.
    if isinstance(source, Path) or source.count("/") > 1 or source.startswith((".", "/")):
        raise InputError(f"no such directory: {source}")
    return fetched(source, revision)
