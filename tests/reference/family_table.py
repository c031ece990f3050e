"""One table of the families, families.yaml, and what is made of an entry.

To add a family, add an entry to families.yaml under its model_type; every test of the table runs over it:

- sizes: options of a small model, which all of its models have;
- configs: changes of the sizes that concern heads too; the head of the language model meets each with padding
  on both sides, and every other head meets the last two;
- trunks: changes that no head reads, met by the language model alone;
- sides: sides of padding, where transformers can take only some; right: heads that it computes with padding
  on the right alone;
- refused: options that are not computed, the message that says so, and the class for which (by default the
  first of the family); `absent` takes an option away;
- published: parameters of the presets; described: options with which transformers makes the same model.

Labels go by the name of the class (family_inputs.py). What transformers computes in float32 whatever the
model's type has an entry in exactness.py. What is particular to a family has a test of its own.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from exactness import with_exact_tables  # noqa: E402

from polyformer.models.architectures import Transformer  # noqa: E402
from polyformer.models.checkpoints import FAMILIES  # noqa: E402
from polyformer.models.config import ModelConfig  # noqa: E402

Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A family of the table."""

    sizes: Options
    configs: list[Options] = dataclasses.field(default_factory=list)
    trunks: list[Options] = dataclasses.field(default_factory=list)
    sides: list[str] = dataclasses.field(default_factory=lambda: ["left", "right"])
    right: list[str] = dataclasses.field(default_factory=list)
    refused: list[list[Any]] = dataclasses.field(default_factory=list)
    published: dict[str, int] = dataclasses.field(default_factory=dict)
    described: dict[str, Options] = dataclasses.field(default_factory=dict)


TABLE = {
    name: Entry(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("families.yaml").read_text()).items()
    if not name.startswith(".")
}
TEXTS = [name for name in TABLE if FAMILIES[name].model is Transformer]
"""Families of texts."""

WRITES = (
    "LMHeadModel",
    "ForCausalLM",
    "ForConditionalGeneration",
    "WithLMHeadModel",
    "ModelWithLMHead",
    "MTModel",
)


def language_model(name: str) -> str:
    """The class of a family that the others share a trunk with."""
    kinds = "ForMaskedLM", *WRITES, "ForImageClassification", "Model", "ModelWithProjection"
    return next(task for task in kinds if task in FAMILIES[name].tasks)


def their_config(name: str, task: str = "Model", **options: Any) -> Any:
    """transformers' configuration of a small model with some `options` changed."""
    family = FAMILIES[name]
    return getattr(transformers, family.class_prefix + task).config_class(
        **{**TABLE[name].sizes, **family.tasks[task].required, **options}
    )


def their_model(name: str, task: str, **options: Any) -> Any:
    """A small model of transformers, exact in float64, with a bias of the output where there is one."""
    kind = getattr(transformers, FAMILIES[name].class_prefix + task)
    torch.manual_seed(7)
    model = with_exact_tables(kind(their_config(name, task, **options)))
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    return model


def read_config(theirs: Any, **options: Any) -> ModelConfig:
    """Ours of their configuration with some `options` changed, or taken away where `absent`."""
    hub = {name: value for name, value in {**theirs.to_dict(), **options}.items() if value != "absent"}
    family = FAMILIES[hub["model_type"]]
    return family.config(hub, family.task(hub, None))


def classes() -> Iterator[tuple[str, str]]:
    """Every family with every class of transformers that it reads."""
    return ((name, task) for name in TABLE for task in FAMILIES[name].tasks)


def tiny(name: str, task: str, **options: Any) -> Any:
    """A model of transformers in evaluation mode, no weight of which has its initial value."""
    model = their_model(name, task, **options).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            waves = "embed_positions" in key and name in ("marian", "pegasus")
            if tensor.is_floating_point() and "inv_freq" not in key and not waves:
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model
