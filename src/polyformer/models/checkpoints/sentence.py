"""Folders of sentence-transformers: a public checkpoint, with the pooling of its vectors next to it.

`modules.json` lists the steps for a text: the model, a pooling with its own folder, and perhaps a
normalization to length 1. Reimers and Gurevych 2019, section 3.
"""

from pathlib import Path

from polyformer.core.errors import InputError, unknown
from polyformer.core.files import read_json, write_json
from polyformer.core.ops.pooling import Pooling
from polyformer.models.config import ModelConfig, max_positions
from polyformer.nn.heads import EmbedConfig

MODULES = "modules.json"
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
    name = modules[1].get("path")
    # The file is untrusted and must not lead out of its folder.
    if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
        raise InputError(f"{folder / MODULES}: expected the name of a folder for Pooling's path")
    return EmbedConfig(pooling=_pooling(folder / name / "config.json"), normalize=len(kinds) == 3)


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
