"""The configuration of a wrapped model, its saved folder, and weights that stay in a folder until a call.

The configuration has ours as plain data, and the attributes for transformers' tools. config.json names, for
each Auto class, a class of a module in the folder (`auto_map`), which transformers imports with
`trust_remote_code=True`. So `AutoModel` loads the folder if polyformer is installed but not imported. The
module contains only one import: the code is in the package.

Weights that accelerate offloads (`cpu_offload`, a device map with "disk") are loaded for a call: accelerate
loads a module's weights when the module is called and drops them afterwards. Some of our weights are read by
other modules: the token table by the head, a position scheme by attention. These stay loaded while the model
runs; linear layers, norms and convolutions, which have nearly all weights, are loaded individually.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

import transformers
from torch import nn

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.core.ops.linear import Linear
from polyformer.models.architectures import TrajectoryConfig
from polyformer.models.architectures.model_card import CARD, Card, is_generated
from polyformer.models.architectures.pretrained import TrainingRecord, known_labels
from polyformer.models.config import ModelConfig

# Our names for the kinds of labels, and the names in transformers.
PROBLEMS = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}

# The option that identifies a `TrajectoryConfig`.
TRAJECTORY = "max_timesteps"

Tree = dict[str, Any]


class PolyformerConfig(transformers.PreTrainedConfig):
    """The configuration of a wrapped model: `polyformer` is a `ModelConfig` or `TrajectoryConfig` as plain
    data.

    All sizes come from `polyformer`. The other arguments that change the model are `vocab_size`, `num_labels`
    (or `id2label`) and `problem_type`. `training_record` and `license` appear in the model's card
    (`polyformer.models.architectures.model_card`).
    """

    model_type = "polyformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "encoder_last_hidden_state",
        "encoder_hidden_states",
        "encoder_attentions",
    ]
    polyformer: dict[str, Any] | None = None
    training_record: dict[str, Any] | None = None
    license: str | None = None
    use_cache: bool = True
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = None

    def __post_init__(self, **options: Any) -> None:
        tree = self.polyformer or {}
        special = tree.get("special", {})
        for role in ("pad", "bos", "eos"):
            options.setdefault(f"{role}_token_id", special.get(role))
        head = tree.get("head", {})
        if "num_labels" in head and self.id2label is None:
            options.setdefault("num_labels", head["num_labels"])
        if self.problem_type is None:
            self.problem_type = PROBLEMS.get(head.get("problem"))  # type: ignore[assignment]
        self.is_encoder_decoder = all(tree.get(side) for side in ("encoder", "decoder"))
        # Tools read sizes here, but cannot change them.
        both = {**options, **hub_attributes(tree)}
        if self.is_encoder_decoder:
            both["decoder_start_token_id"] = special.get("bos")
        start = both.pop("decoder_start_token_id", None)
        super().__post_init__(**both)
        if start is not None:  # the base class accepts the generation settings of old files and drops them
            self.decoder_start_token_id = start

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: saved files name the package's class, and contain no copy of its source."""

    def resolve(self) -> ModelConfig | TrajectoryConfig:
        """Return our configuration, with the arguments that change it."""
        if self.polyformer is None:
            raise InputError(
                "polyformer: expected the model's configuration, got None; "
                "use polyformer.models.transformers.wrap"
            )
        if TRAJECTORY in self.polyformer:
            return TrajectoryConfig.from_dict(self.polyformer)
        head = dict(self.polyformer["head"])
        if "num_labels" in head:
            head["num_labels"] = self.num_labels
        if self.problem_type is not None and head.get("problem", "") in (None, *PROBLEMS):
            head["problem"] = next(ours for ours, theirs in PROBLEMS.items() if theirs == self.problem_type)
        return ModelConfig.from_dict({**self.polyformer, "head": head, "vocab_size": self.vocab_size})

    def transformer(self) -> ModelConfig:
        """Return our configuration, for a model that reads tokens."""
        resolve = self.resolve()
        assert isinstance(resolve, ModelConfig)
        return resolve


def hub_attributes(tree: Tree) -> Tree:
    """Return the attributes that transformers' tools read from a configuration, by their names."""
    if not tree:
        return {"vocab_size": 0}
    stack = tree.get("decoder") or tree["encoder"]
    attention = stack["attention"]
    heads = attention["num_attention_heads"]
    fields = {
        "hidden_size": tree["hidden_size"],
        "num_hidden_layers": stack["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": attention["num_key_value_heads"] or heads,
        "head_dim": attention["head_size"] or tree["hidden_size"] // heads,
        "intermediate_size": stack["feedforward"].get("intermediate_size"),
        "max_position_embeddings": tree["max_position_embeddings"],
        "initializer_range": tree["initializer_range"] or 0.02,
    }
    if TRAJECTORY in tree:
        return fields | {"state_dim": tree["head"]["state_size"], "act_dim": tree["head"]["action_size"]}
    embedding = tree["embedding"]
    fields |= {
        "vocab_size": tree["vocab_size"],
        "type_vocab_size": embedding["type_vocab_size"],
        "tie_word_embeddings": embedding["tied"],
    }
    if tree.get("encoder") and tree.get("decoder"):
        fields["encoder_layers"] = tree["encoder"]["num_hidden_layers"]
        fields["decoder_layers"] = tree["decoder"]["num_hidden_layers"]
    return fields


def config_of(model: Any) -> PolyformerConfig:
    """Return the configuration for our `model`, with the label names of its checkpoint."""
    tree, known, names = model.config.to_dict(), {}, known_labels(model)
    if names:
        numbers = {name: number for number, name in enumerate(names)}
        known = {"id2label": dict(enumerate(names)), "label2id": numbers}
    record = None if model.record is None else model.record.to_dict()
    return PolyformerConfig(polyformer=tree, training_record=record, **known)


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


# Modules with weights that no other module reads, unless they are part of `READ`.
CALLED = (Linear, nn.LayerNorm, nn.Conv1d)

# Parts of a model with weights that other modules read.
READ = ("tokens", "decoder_tokens", "head", "encoder.position", "decoder.position")


@contextlib.contextmanager
def shared_weights_loaded(model: nn.Module) -> Iterator[None]:
    """Keep all weights of `model` that other modules read loaded within the context."""
    hooks: list[tuple[Any, Any]] = [(module, module._hf_hook) for module in _modules_to_load(model)]
    forwards = [(module, module.forward) for module, _ in hooks]
    for module, hook in hooks:
        hook.pre_forward(module)
        module.forward = module._old_forward  # its own hook would drop the weights after a call
    try:
        yield
    finally:
        for module, forward in forwards:
            module.forward = forward
        for module, hook in hooks:
            hook.post_forward(module, None)


def _modules_to_load(model: nn.Module) -> list[nn.Module]:
    """Return the modules to keep loaded, among the modules with a hook of accelerate."""
    if not any("_hf_hook" in vars(module) for module in model.modules()):
        return []
    return [
        module
        for name, module in model.named_modules()
        if getattr(getattr(module, "_hf_hook", None), "offload", False)
        and (not isinstance(module, CALLED) or name.startswith(READ) or ".router" in name)
    ]
