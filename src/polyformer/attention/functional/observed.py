"""Observation of `attend`: the requests of all calls, for inspection."""

from contextlib import AbstractContextManager

from polyformer.attention.functional.request import Request
from polyformer.core.recorder import Recorder

_recorder: Recorder[Request] = Recorder("observed_calls")


def observed() -> AbstractContextManager[list[Request]]:
    """Collect the requests of all calls of `attend` in the context, in order; the calls run as usual."""
    return _recorder.collect()


def observing() -> bool:
    """Return whether requests are being collected."""
    return _recorder.records is not None


def observe(request: Request) -> None:
    """Pass a call to all active collectors."""
    _recorder.record(request)
