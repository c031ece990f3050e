"""The tap of `attend`: what every call was asked, for those who look inside."""

from contextlib import AbstractContextManager

from polyformer.core.tap import Tap
from polyformer.dot_product.request import Request

_tap: Tap[Request] = Tap("observed_calls")


def observed() -> AbstractContextManager[list[Request]]:
    """Collects the request of every call of `attend` inside, in order; the calls run as they would."""
    return _tap.collected()


def observing() -> bool:
    """Whether somebody is looking."""
    return _tap.records is not None


def observe(request: Request) -> None:
    """Shows a call to whoever collects."""
    _tap.show(request)
