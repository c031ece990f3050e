"""The saved folder of a wrapped model: its module and card, and its upload to the hub.

config.json names, for each Auto class, a class of a module in the folder (`auto_map`), which transformers
imports with `trust_remote_code=True`. So `AutoModel` loads the folder if polyformer is installed but not
imported. The module contains only one import: the code is in the package.
"""

import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

from polyformer.core.files import atomic_write
from polyformer.models.architectures.model_card import CARD, Card, is_generated
from polyformer.models.architectures.training_record import TrainingRecord

MODULE = "modeling_polyformer"


def auto_map(kind: type[Any]) -> dict[str, str]:
    """Return the classes by the names of transformers' Auto classes, for a model of the class `kind`."""
    task = kind.__name__.removeprefix("Polyformer")
    names = {"AutoConfig": "PolyformerConfig", "AutoModel": "PolyformerModel"}
    if task.startswith("For"):
        names[f"AutoModel{task}"] = kind.__name__
    return {auto: f"{MODULE}.{name}" for auto, name in names.items()}


def write_module(folder: str | PathLike[str], names: dict[str, str]) -> None:
    """Write the module that `names`, an `auto_map`, refers to."""
    classes = ", ".join(sorted({name.removeprefix(f"{MODULE}.") for name in names.values()}))
    text = (
        '"""Read by transformers with trust_remote_code=True. It needs `pip install polyformer`."""\n\n'
        f"from polyformer.models.transformers import {classes}\n"
    )
    atomic_write(Path(folder) / f"{MODULE}.py", text.encode())


def card_of(model: Any, name: str, *, measured: bool = True, tags: tuple[str, ...] = ()) -> Card:
    """Return the data of the card of the wrapped `model`; `name` is the name of the folder or the repository.

    `measured`: the metrics of the training belong to these weights.
    """
    config = model.config
    record = config.training_record and TrainingRecord.from_dict(config.training_record)
    auto = [*auto_map(type(model))][-1]
    use = (
        f"```python\nfrom transformers import {auto}  # pip install 'polyformer[hub]'\n\n"
        f'model = {auto}.from_pretrained("{name}", trust_remote_code=True)\n```\n\n'
        "The folder's `modeling_polyformer.py` holds one import; "
        "`import polyformer.models.transformers` before loading does "
        f'without `trust_remote_code`. Without transformers: `polyformer.from_pretrained("{name}")`.'
    )
    return Card(
        name=name,
        config=config.resolve(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        use=use,
        record=record,
        measured=measured and record is not None and record.holds_for(model.model.state_dict()),
        license=config.license,
        tags=("custom_code", *tags),
    )


def push(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | str | None = None,
    card: Path | None = None,
) -> str:
    """Upload the wrapped `model` with huggingface_hub and return the address of the commit.

    The options are the same as in transformers' `push_to_hub`. A README.md that somebody wrote is kept: the
    file in the repository, or else the file `card`; a generated README.md is replaced.
    """
    from huggingface_hub import HfApi

    hub = HfApi(token=token)
    name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        hub.create_branch(name, branch=revision, exist_ok=True)
    more = (tags,) if isinstance(tags, str) else tuple(tags or ())
    with tempfile.TemporaryDirectory() as place:
        folder, fetched = Path(place, "model"), Path(place, "fetched")
        # A card that somebody wrote in the repository takes precedence.
        own = _user_card(_remote_card(hub, name, revision, fetched))
        own = _user_card(card) if own is None else own
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        text = own if own is not None else card_of(model, name, tags=more).text()
        (folder / CARD).write_text(text, encoding="utf-8")
        return hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=commit_message or f"Upload {type(model).__name__}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _remote_card(hub: Any, name: str, revision: str | None, folder: Path) -> Path | None:
    """Return the path of the repository's README.md, fetched into `folder`; None if there is none."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RevisionNotFoundError

    try:
        return Path(hub.hf_hub_download(name, CARD, revision=revision, local_dir=folder))
    except LocalEntryNotFoundError:  # the hub did not answer: there may be a file
        raise
    except (EntryNotFoundError, RevisionNotFoundError):
        return None


def _user_card(path: Path | None) -> str | None:
    """Return the text of the card in the file `path` if somebody wrote or changed it."""
    if path is None or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    return None if is_generated(text) else text
