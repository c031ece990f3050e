"""Settings that a resumed run takes from its checkpoint, to match an uninterrupted run bit by bit."""

from typing import Any

from torch import nn

from polyformer.core.ops.cpu_threads import suitable_threads
from polyformer.core.ops.tuning import store
from polyformer.training.engine import Engine
from polyformer.training.environment import PROCESSOR, THREADS, differences, versions


def choose_threads(engine: Engine, model: nn.Module, saved: dict[str, Any] | None) -> tuple[int, list[str]]:
    """Return the number of threads to train `model` with, and notes for the user; `saved`: the resumed state.

    By default a resumed run uses the number of threads of its start: a sum split differently rounds
    differently.
    """
    own = engine.config.threads or suitable_threads(model)
    if saved is None:
        return own, []
    before = saved["machine"].get(THREADS, own)
    number = engine.config.threads or before
    notes = [f"{number} threads, as the run began; --training.engine.threads N for others"]
    now = {**engine.machine(), THREADS: number, **versions()}
    changed = differences({**saved["machine"], **saved["versions"]}, now)
    if changed:
        return number, [f"{'; '.join(changed)}: the last bits may differ from an uninterrupted run's"]
    return number, notes if number != own and engine.device.type == "cpu" else []


def choose_kernels(engine: Engine, saved: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the tuning choices of the run with the state `saved`, and notes for the user.

    On another machine the choices are not reused: the results would differ in the last bits anyway.
    """
    before = {} if saved is None else saved.get("tuning", {})
    now = engine.machine()
    if saved is None or any(saved["machine"].get(name) != now[name] for name in PROCESSOR):
        return {}, []
    pinned = store.pinned()
    if pinned is not None and any(pinned.get(name) != choice for name, choice in before.items()):
        return before, [f"{store.PIN} is set: the last bits may differ from an uninterrupted run's"]
    return before, []
