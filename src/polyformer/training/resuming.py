"""What a resumed run keeps of the way it was computed, so that its bits stay those of one never stopped."""

from typing import Any

from torch import nn

from polyformer.ops.tuning import store
from polyformer.ops.workers import usual_threads
from polyformer.training.engine import Engine
from polyformer.training.environment import PROCESSOR, THREADS, differences, versions


def choose_threads(engine: Engine, model: nn.Module, saved: dict[str, Any] | None) -> tuple[int, list[str]]:
    """How many threads train `model`, and what to say of a run whose state is `saved`.

    A resumed run computes with as many as it began with, if nothing else is asked for: sums split
    otherwise round otherwise.
    """
    own = engine.config.threads or usual_threads(model)
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
    """The choices of tuning that the run whose state is `saved` was made with, and what to say of them.

    Another machine goes on with its own: there nothing would keep the bits.
    """
    before = {} if saved is None else saved.get("tuning", {})
    now = engine.machine()
    if saved is None or any(saved["machine"].get(name) != now[name] for name in PROCESSOR):
        return {}, []
    pinned = store.pinned()
    if pinned is not None and any(pinned.get(name) != choice for name, choice in before.items()):
        return before, [f"{store.PIN} is set: the last bits may differ from an uninterrupted run's"]
    return before, []
