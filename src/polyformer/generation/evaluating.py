"""A model in evaluation mode for the time of a call, however many threads call it at once."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import nn


class Modules(Protocol):
    """What has parts: any `nn.Module`."""

    def modules(self) -> Iterator[nn.Module]: ...


_lock = threading.Lock()
_users: "WeakKeyDictionary[Modules, tuple[int, list[nn.Module]]]" = WeakKeyDictionary()
"""For each model in use: by how many calls, and the parts that were in training mode before the first."""


@contextlib.contextmanager
def evaluating(model: Modules) -> Iterator[None]:
    """The model in evaluation mode; once the last of the calls that overlap has ended, as it was before the
    first: the end of one must not turn dropout on in another."""
    with _lock:
        count, training = _users.get(model, (0, []))
        for module in model.modules():
            if module.training:
                training.append(module)
                module.training = False
        _users[model] = count + 1, training
    try:
        yield
    finally:
        with _lock:
            count, training = _users.pop(model)
            if count > 1:
                _users[model] = count - 1, training
            else:
                for module in training:
                    module.training = True
