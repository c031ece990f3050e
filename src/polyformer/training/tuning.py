"""Tuning of a few new weights while the model's own are frozen.

In low-rank adaptation every tuned projection becomes

    y = W x + (alpha / r) B A dropout(x)          A [r, in], B [out, r]

A is random and B zero, so training starts from the model's function. Only A and B are trained, and only they
are in checkpoints and in the folder of the run, as an adapter of peft. Hu et al. 2022 (LoRA), section 4.1, by
the package peft.
"""

import abc
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.imports import needs_extra
from polyformer.core.ranges import PositiveFloat, PositiveInt, Wording
from polyformer.models.architectures.pretrained import WEIGHTS
from polyformer.models.checkpoints.adapters import ADAPTER_WEIGHTS, PREFIX

Dropped = Annotated[float, Interval(ge=0, lt=1), Wording("a share below 1")]

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
"""The linear layers of attention and feed-forward."""

ADAPTED = "lora_"
"""Part of the name of every tensor of an adapter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig(Config):
    """Base of the ways to train new weights only."""

    option: ClassVar[str] = "tuning.kind"

    @abc.abstractmethod
    def prepare(self, model: nn.Module) -> None:
        """Add the new weights to `model` in place and freeze its own."""

    @abc.abstractmethod
    def write_settings(self, model: nn.Module, folder: Path, base: str) -> None:
        """Write the settings of the new weights into a folder; `base`: where the frozen weights are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankConfig(TuningConfig):
    """Low-rank adapters: train a product of two narrow matrices next to each projection."""

    rank: PositiveInt = 16
    alpha: PositiveFloat | None = None  # None: twice the rank
    dropout: Dropped = 0.0  # of the adapter's input
    targets: tuple[str, ...] = PROJECTIONS  # names of linear layers of attention and feed-forward

    kind: ClassVar[str] = "lora"
    paper: ClassVar[str] = "Hu et al. 2022 (LoRA), section 4.1"

    def prepare(self, model: nn.Module) -> None:
        """Add adapters to the targets in `model`, in place, and freeze all other weights.

        Raises `InputError` for a model without a target, and without the package peft.
        """
        names = self.modules(model)
        with needs_extra("linearize", "low-rank tuning needs the package peft"):
            import peft
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # peft does not know the class of the model
            settings = peft.LoraConfig(
                r=self.rank,
                lora_alpha=self.alpha or 2 * self.rank,  # type: ignore[arg-type]
                lora_dropout=self.dropout,
                target_modules=names,
            )
            peft.inject_adapter_in_model(settings, model)
        keep_adapter_only(model)

    def modules(self, model: nn.Module) -> list[str]:
        """Return the names of the linear layers that get an adapter."""
        names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and ".layers." in name
            and name.rpartition(".")[2] in self.targets
        ]
        if not names:
            raise InputError(
                "tuning.targets: expected names of linear layers of the model, "
                f"got {quote(list(self.targets))}"
            )
        return names

    def write_settings(self, model: nn.Module, folder: Path, base: str) -> None:
        """Write adapter_config.json, as peft does."""
        settings: Any = dataclasses.replace(model.peft_config["default"])  # type: ignore[index, arg-type]
        settings.base_model_name_or_path = base
        settings.target_modules = sorted(settings.target_modules)  # a set has another order in every run
        settings.inference_mode = True
        settings.save_pretrained(folder)


def adapted(model: nn.Module) -> list[str]:
    """Return the names of the modules with an adapter."""
    return [
        name.partition(f".{ADAPTED}A")[0] for name, _ in model.named_parameters() if f".{ADAPTED}A" in name
    ]


def has_adapter(model: nn.Module) -> bool:
    """Return whether a model has an adapter that is not merged."""
    return bool(adapted(model))


def keep_adapter_only(model: nn.Module) -> None:
    """Leave the frozen weights out of the states that `model` returns and needs.

    A checkpoint of a large model is then small; the frozen weights are read from where training started.
    """

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.startswith(prefix) and ADAPTED not in name]:
            del state[name]

    def forgive(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if ADAPTED in name]

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_post_hook(forgive)


class AdapterState(nn.Module):
    """The state of the adapter in a model by the names of peft's files, as the content of a file."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model = [model]  # no submodule, which would be saved too

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the matrices A and B of each module."""
        state = self._model[0].state_dict()
        return {f"{PREFIX}{name.replace('.default.', '.')}": tensor for name, tensor in state.items()}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Compute with only the frozen weights within the context."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # Not by enable_adapters, which also stops the gradients of the adapter.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def check_start(report: Any, source: str) -> None:
    """Raise `InputError` if a checkpoint lacks weights of the model, which would stay as drawn."""
    if report.newly_initialized:
        raise InputError(
            f"tuning: {source} has no {report.newly_initialized[0]}, and only an adapter would be trained; "
            "leave out --tuning, or begin with a model that was trained for this task"
        )


def draw_adapter(tuning: TuningConfig, model: nn.Module, seed: int) -> None:
    """Add the new weights of `tuning` to `model`, drawn from a separate seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuning.prepare(model)


def weights_file(folder: Path, model: nn.Module) -> tuple[Path, nn.Module]:
    """Return the file of the weights of a trained model in a folder, and the module with its content."""
    if has_adapter(model):
        return folder / ADAPTER_WEIGHTS, AdapterState(model)
    return folder / WEIGHTS, model


def write_adapter(tuning: TuningConfig | None, model: nn.Module, folder: Path, base: str | None) -> None:
    """Write the settings of an adapter next to its weights; nothing for a model without an adapter.

    base: the checkpoint with the frozen weights, a path or a name on the hub.
    """
    if tuning is not None and base is not None and has_adapter(model):
        place = Path(base)
        tuning.write_settings(model, folder, str(place.absolute() if place.exists() else base))
