"""The tap of `attend`: what every call was asked, for those who look inside."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch

from polyformer.dot_product.request import Request

_tap: contextvars.ContextVar[list[Request] | None] = contextvars.ContextVar("observed_calls", default=None)


@contextlib.contextmanager
def observed() -> Iterator[list[Request]]:
    """Collects the request of every call of `attend` inside, in order; the calls run as they would."""
    requests: list[Request] = []
    token = _tap.set(requests)
    try:
        yield requests
    finally:
        _tap.reset(token)


def observing() -> bool:
    """Whether somebody is looking."""
    return not torch.compiler.is_compiling() and _tap.get() is not None


def observe(request: Request) -> None:
    """Shows a call to whoever collects."""
    requests = None if torch.compiler.is_compiling() else _tap.get()  # a traced graph keeps no list
    if requests is not None:
        requests.append(request)
