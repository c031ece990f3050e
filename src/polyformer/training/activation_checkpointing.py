"""Activation checkpointing: the switch `recompute` on submodules of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from polyformer.core.errors import InputError


def check_activation_checkpointing(model: nn.Module, wanted: bool) -> None:
    """Raise `InputError` if recomputation is `wanted` but no submodule of `model` supports it."""
    if wanted and not _switches(model):
        raise InputError(
            f"recompute: no part of {type(model).__name__} has an attribute 'recompute', so it cannot "
            "compute its activations again; set recompute to false"
        )


@contextmanager
def activation_checkpointing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Set `recompute` on every submodule of `model` that has the switch, and restore it at the end."""
    parts = _switches(model)
    before = [part.recompute for part in parts]
    for part in parts:
        part.recompute = wanted
    try:
        yield
    finally:
        for part, value in zip(parts, before):
            part.recompute = value


def _switches(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "recompute")]
