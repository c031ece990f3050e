"""The kinds of models and their configurations: a `Transformer` reads tokens, a `TrajectoryTransformer`
recorded steps, a `VisionTransformer` images, `TwoTowers` read texts and images, and a `Policy` acts.

Code that saves, loads or trains models uses this module, so that it does not depend on a single kind.
"""

from pathlib import Path
from typing import Any

from polyformer.core.files import read_json
from polyformer.models.architectures.policy import Policy, PolicyConfig
from polyformer.models.architectures.pretrained import CONFIG
from polyformer.models.architectures.towers import TowersConfig, TwoTowers
from polyformer.models.architectures.trajectory import TrajectoryConfig, TrajectoryTransformer
from polyformer.models.architectures.transformer import Transformer
from polyformer.models.architectures.vision import VisionConfig, VisionTransformer
from polyformer.models.config import ModelConfig

AnyConfig = ModelConfig | TrajectoryConfig | VisionConfig | TowersConfig | PolicyConfig
AnyModel = Transformer | TrajectoryTransformer | VisionTransformer | TwoTowers | Policy

# The options that identify a configuration in polyformer's format; without them it is for a
# `Transformer`.
IDENTIFYING_OPTIONS = {
    "max_timesteps": TrajectoryConfig,
    "image_size": VisionConfig,
    "image": TowersConfig,
    "num_actions": PolicyConfig,
}

MODEL_CLASSES = {
    ModelConfig: Transformer,
    TrajectoryConfig: TrajectoryTransformer,
    VisionConfig: VisionTransformer,
    TowersConfig: TwoTowers,
    PolicyConfig: Policy,
}


def decode_config(data: Any, where: str = "") -> AnyConfig:
    """Return the configuration of any kind that `data` describes; raises `InputError` for none."""
    # No configuration has two of these options.
    marks = IDENTIFYING_OPTIONS.keys() & data.keys() if isinstance(data, dict) else ()
    return next((IDENTIFYING_OPTIONS[mark] for mark in marks), ModelConfig).from_dict(data, where)


def read_config(folder: Path) -> AnyConfig:
    """Return the configuration that `save_pretrained` wrote into `folder`."""
    return decode_config(read_json(folder / CONFIG, dict))


def build_model(config: AnyConfig) -> AnyModel:
    """Return the model that `config` describes, with fresh weights."""
    return MODEL_CLASSES[type(config)](config)


def load_pretrained(folder: Path) -> AnyModel:
    """Return the model that `save_pretrained` wrote into `folder`, in evaluation mode."""
    return MODEL_CLASSES[type(read_config(folder))].from_pretrained(folder)
