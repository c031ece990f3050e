"""The kinds of models by what describes them: a `Transformer` reads tokens, a `TrajectoryTransformer` steps.

What saves, loads and trains models asks here, and so knows neither kind by name.
"""

from pathlib import Path
from typing import Any

from polyformer.architecture import ModelConfig
from polyformer.core.files import read_json
from polyformer.model.saving import CONFIG
from polyformer.model.trajectory import TrajectoryConfig, TrajectoryTransformer
from polyformer.model.transformer import Transformer

AnyConfig = ModelConfig | TrajectoryConfig
AnyModel = Transformer | TrajectoryTransformer

TRAJECTORY = "max_timesteps"
"""The option by which a configuration in our format is known as that of a `TrajectoryTransformer`."""


def decode_config(data: Any, where: str = "") -> AnyConfig:
    """The configuration that `data` describes, of whichever kind; `InputError` where it describes none."""
    kind = TrajectoryConfig if isinstance(data, dict) and TRAJECTORY in data else ModelConfig
    return kind.from_dict(data, where)


def read_config(folder: Path) -> AnyConfig:
    """The configuration that `save_pretrained` wrote into `folder`."""
    return decode_config(read_json(folder / CONFIG, dict))


def build_model(config: AnyConfig) -> AnyModel:
    """The model that `config` describes, with fresh weights."""
    return TrajectoryTransformer(config) if isinstance(config, TrajectoryConfig) else Transformer(config)


def load_pretrained(folder: Path) -> AnyModel:
    """The model that `save_pretrained` wrote into `folder`, in evaluation mode."""
    trajectories = isinstance(read_config(folder), TrajectoryConfig)
    return (TrajectoryTransformer if trajectories else Transformer).from_pretrained(folder)
