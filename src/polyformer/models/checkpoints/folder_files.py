"""Other files of a public checkpoint's folder: of sentence-transformers and of image processors.

A folder of sentence-transformers is a public checkpoint with the pooling of its vectors next to it.
`modules.json` lists the steps for a text: the model, a pooling with its own folder, and perhaps a
normalization to length 1. Other files say how texts are read:

    config_sentence_transformers.json   prompts by name, and the name of the default prompt
    sentence_bert_config.json           max_seq_length, do_lower_case; older folders have other models' names
    tokenizer_config.json               model_max_length, if there is no max_seq_length

Reimers and Gurevych 2019, section 3. The file preprocessor_config.json describes the conversion of pictures
by transformers' image processor.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_json, write_json
from polyformer.core.ops.layers import Pooling
from polyformer.core.paths import leaves_folder, refuse_links
from polyformer.core.ranges import SIZE
from polyformer.models.checkpoints.config_mapping import Tree
from polyformer.models.config import ModelConfig, max_positions
from polyformer.nn.heads import EmbedConfig

MODULES = "modules.json"
READING = [
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert")
]
READING += ["sentence_xlm-roberta_config.json", "sentence_xlnet_config.json"]
PROMPTS = "config_sentence_transformers.json"
# Their names, in newer and in older folders, with ours.
POOLINGS: dict[str, Pooling] = {
    "cls": "first",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


def embedding_head(folder: Path) -> EmbedConfig | None:
    """Return the embedding head of a folder; None if it is not a folder of sentence-transformers.

    Raises `InputError` for modules and poolings that we do not have, and for damaged files.
    """
    if not (folder / MODULES).is_file():
        return None
    modules = read_json(folder / MODULES, list)
    if not all(isinstance(module, dict) for module in modules):
        raise InputError(f"{folder / MODULES} is damaged: expected a list of modules; restore it from a copy")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InputError(
            f"{folder / MODULES}: expected the modules Transformer, Pooling and perhaps Normalize, got "
            f"{', '.join(kinds)[:200]}; give the head as an EmbedConfig, or load the model without it"
        )
    return EmbedConfig(pooling=_pooling(_pooling_file(folder, modules)), normalize=len(kinds) == 3)


@dataclass(frozen=True)
class TextReading:
    """The reading of texts in a folder.

    most: the most tokens per text, including special tokens; None for no limit in the files. lowercase:
    whether texts are converted to lower case first. prompt: precedes every text.
    """

    most: int | None = None
    lowercase: bool = False
    prompt: str = ""


def text_reading(folder: Path, prompt_name: str | None = None) -> TextReading:
    """Return how sentence-transformers reads texts for the model in `folder`, with a prompt by its name.

    Without a name it is the default prompt of the folder. Raises `InputError` for an unknown prompt, and for
    a prompt that is left out of the pooling, which is not supported.
    """
    described, tokenizer, prompts = _table(folder, *READING), _table(folder, "tokenizer_config.json"), {}
    limit = described.get("max_seq_length") or tokenizer.get("model_max_length")
    about = _table(folder, PROMPTS)
    if isinstance(about.get("prompts"), dict):
        prompts = {str(name): str(text or "") for name, text in about["prompts"].items()}
    name = about.get("default_prompt_name") if prompt_name is None else prompt_name
    if name is not None and name not in prompts:
        raise unknown(f"prompt of {folder}:", str(name), prompts)
    prompt = "" if name is None else prompts[name]
    if prompt and _leaves_prompt_out(folder):
        raise InputError(
            f"{folder}: its pooling leaves the prompt {quote(prompt)} out (include_prompt), which is not "
            "supported; use sentence-transformers, or set include_prompt to true in the pooling's config.json"
        )
    most = int(limit) if isinstance(limit, int | float) and 0 < limit < SIZE else None
    return TextReading(most, described.get("do_lower_case") is True, prompt)


def _leaves_prompt_out(folder: Path) -> bool:
    if not (folder / MODULES).is_file():
        return False
    described = read_json(_pooling_file(folder, read_json(folder / MODULES, list)), dict)
    return described.get("include_prompt", True) is False


def _table(folder: Path, *names: str) -> dict[str, Any]:
    """Return the first of these files that exists; empty without any."""
    paths = [folder / name for name in names if (folder / name).is_file()]
    return read_json(paths[0], dict) if paths else {}


def write_modules(config: ModelConfig, folder: Path) -> bool:
    """Write the files by which sentence-transformers opens `folder`, which contains a model for transformers.

    These are its modules, and the maximum length of texts. Returns False and writes nothing for a head that
    does not pool the model's own states.
    """
    head = config.head
    if not isinstance(head, EmbedConfig) or head.hidden:
        return False
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head.normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    modes = {name: POOLINGS[name] == head.pooling for name in POOLINGS if name.startswith("pooling_mode_")}
    write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": config.hidden_size, **modes}
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_positions(config)})
    write_json(folder / MODULES, modules)
    return True


def _pooling_file(folder: Path, modules: list[Any]) -> Path:
    """Return the configuration of the second module; it must lie in a folder within `folder`."""
    name = modules[1].get("path") if len(modules) > 1 and isinstance(modules[1], dict) else None
    # The file is untrusted and must not lead out of its folder.
    if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
        raise InputError(f"{folder / MODULES}: expected the name of a folder for Pooling's path")
    refuse_links(folder / name)
    if leaves_folder(folder, folder / name):
        raise InputError(
            f"{folder / name} is a link to a folder outside of {folder}; put the folder itself there"
        )
    return folder / name / "config.json"


def _pooling(path: Path) -> Pooling:
    """Return the only pooling in a module's configuration."""
    described = read_json(path, dict)
    modes = [name for name, on in described.items() if name.startswith("pooling_mode_") and on]
    named = described.get("pooling_mode")
    modes += [named] if isinstance(named, str) else list(named or ())
    if len(modes) != 1:
        raise InputError(
            f"{path}: expected one pooling, got {', '.join(map(str, modes))[:200] or 'none'}; "
            f"poolings side by side are not supported"
        )
    if modes[0] not in POOLINGS:
        raise unknown(f"pooling in {path}:", modes[0], POOLINGS)
    return POOLINGS[modes[0]]


PREPROCESSOR = "preprocessor_config.json"


def read_preprocessor(folder: Path, names: tuple[str, ...]) -> Tree:
    """Return the options `names` of the image processor in a folder, as far as they are set."""
    path = folder / PREPROCESSOR
    options = read_json(path, dict) if names and path.is_file() else {}
    return {name: options[name] for name in names if name in options}


def write_preprocessor(config: Any, folder: Path) -> None:
    """Write the image processor of a `VisionConfig`: it resizes and normalizes images."""
    height, width = config.image_size
    write_json(
        folder / PREPROCESSOR,
        {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": height, "width": width},
            "resample": 2,  # bilinear
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": _of_channels(config.mean, config.num_channels),
            "image_std": _of_channels(config.std, config.num_channels),
        },
    )


def _of_channels(numbers: tuple[float, ...], channels: int) -> list[float]:
    """Return a number for each channel."""
    return list(numbers) * channels if len(numbers) == 1 else list(numbers)
