"""Imports of packages that are installed with an extra of polyformer."""

import contextlib
from collections.abc import Iterator

from polyformer.core.errors import InputError


@contextlib.contextmanager
def needs_extra(extra: str, reason: str, otherwise: str = "") -> Iterator[None]:
    """Turn an `ImportError` inside into an `InputError` with the way to install the package.

    extra: its name in `pip install 'polyformer[extra]'`. reason: why which package is needed. otherwise:
    another way, such as "or leave it out".
    """
    try:
        yield
    except ImportError as error:
        way = f", {otherwise}" if otherwise else ""
        raise InputError(f"{reason}; pip install 'polyformer[{extra}]'{way}") from error
