"""The kinds of models by what describes them: a `Transformer` reads tokens, a `TrajectoryTransformer`
recorded steps, and a `Policy` acts.

What saves, loads and trains models asks here, and so knows no kind by name.
"""

from pathlib import Path
from typing import Any

from polyformer.architecture import ModelConfig
from polyformer.core.files import read_json
from polyformer.model.policy import Policy, PolicyConfig
from polyformer.model.saving import CONFIG
from polyformer.model.trajectory import TrajectoryConfig, TrajectoryTransformer
from polyformer.model.transformer import Transformer

AnyConfig = ModelConfig | TrajectoryConfig | PolicyConfig
AnyModel = Transformer | TrajectoryTransformer | Policy

MARKS = {"max_timesteps": TrajectoryConfig, "num_actions": PolicyConfig}
"""The options by which a configuration in our format is known as another than that of a `Transformer`."""

MODELS = {ModelConfig: Transformer, TrajectoryConfig: TrajectoryTransformer, PolicyConfig: Policy}


def decode_config(data: Any, where: str = "") -> AnyConfig:
    """The configuration that `data` describes, of whichever kind; `InputError` where it describes none."""
    marks = MARKS.keys() & data.keys() if isinstance(data, dict) else ()
    return next((MARKS[mark] for mark in marks), ModelConfig).from_dict(data, where)


def read_config(folder: Path) -> AnyConfig:
    """The configuration that `save_pretrained` wrote into `folder`."""
    return decode_config(read_json(folder / CONFIG, dict))


def build_model(config: AnyConfig) -> AnyModel:
    """The model that `config` describes, with fresh weights."""
    return MODELS[type(config)](config)


def load_pretrained(folder: Path) -> AnyModel:
    """The model that `save_pretrained` wrote into `folder`, in evaluation mode."""
    return MODELS[type(read_config(folder))].from_pretrained(folder)
