"""Observation of `attend`: the requests of all calls, for inspection."""

from contextlib import AbstractContextManager

from polyformer.attention.functional.request import Request
from polyformer.core.tap import Tap

_tap: Tap[Request] = Tap("observed_calls")


def observed() -> AbstractContextManager[list[Request]]:
    """Collect the requests of all calls of `attend` in the context, in order; the calls run as usual."""
    return _tap.collected()


def observing() -> bool:
    """Return whether requests are being collected."""
    return _tap.records is not None


def observe(request: Request) -> None:
    """Pass a call to all active collectors."""
    _tap.show(request)
