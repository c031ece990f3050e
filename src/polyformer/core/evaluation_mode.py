"""Evaluation mode of a model during calls from several threads, while other threads may train it.

The mode belongs to the module, not to the thread: dropout that one thread turns off is off for all threads.
So evaluating calls and training passes take turns: a training pass waits until the calls in progress have
ended, and a call waits until the passes in progress have ended. An optimizer step may still change the
weights during a call.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from polyformer.core.errors import InputError


class Modules(Protocol):
    """An object with submodules: any `nn.Module`."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the module itself and all submodules."""
        ...


@dataclasses.dataclass(eq=False)
class Use:
    """The threads that use a module, once per call; `training`: its mode before the first call."""

    calls: list[int] = dataclasses.field(default_factory=list[int])
    passes: list[int] = dataclasses.field(default_factory=list[int])
    training: bool = False


_changed = threading.Condition()
_uses: "WeakKeyDictionary[nn.Module, Use]" = WeakKeyDictionary()


@contextlib.contextmanager
def evaluating(model: Modules) -> Iterator[None]:
    """Put the model in evaluation mode, until the last of several overlapping calls has ended.

    The end of one call must not turn dropout on in another.
    """
    modules, thread = list(model.modules()), threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: not any(_trained_by_others(module, thread) for module in modules))
        for module in modules:
            use = _uses.setdefault(module, Use())
            use.training, module.training = use.training or module.training, False
            use.calls.append(thread)
    try:
        yield
    finally:
        with _changed:
            for module in modules:
                use = _uses[module]
                use.calls.remove(thread)
                if not use.calls:
                    module.training, use.training = module.training or use.training, False
                _forget_unused(module)
            _changed.notify_all()


def training_pass(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context for a forward pass, or its recomputation, in the requested training mode.

    Without gradients, and in compiled code, it does nothing.

    Raises:
        InputError: a pass inside a call of the same thread, for which it would wait forever.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    return _training_pass(module)


@contextlib.contextmanager
def _training_pass(module: nn.Module) -> Iterator[None]:
    thread = threading.get_ident()
    with _changed:
        use = _uses.get(module)
        if use is not None and use.training and thread in use.calls:
            raise InputError(
                "generate: its streamer trains the model that is writing, which is in evaluation mode; train "
                "before or after, or a copy (copy.deepcopy)"
            )
        _changed.wait_for(lambda: module not in _uses or not _uses[module].training)
        _uses.setdefault(module, Use()).passes.append(thread)
    try:
        yield
    finally:
        with _changed:
            _uses[module].passes.remove(thread)
            _forget_unused(module)
            _changed.notify_all()


def _trained_by_others(module: nn.Module, thread: int) -> bool:
    use = _uses.get(module)
    return module.training and use is not None and any(other != thread for other in use.passes)


def _forget_unused(module: nn.Module) -> None:
    if not _uses[module].calls and not _uses[module].passes:
        del _uses[module]
