"""Checks of the sizes and probabilities in a configuration, before anything is built from it."""

import dataclasses
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.limits import SIZE

SEEDS = ("seed", "hash_seed")  # integers that are not sizes


def check_most(name: str, value: int | None, most: int) -> None:
    """Raise `InputError` if `value`, called `name` by the user, is above the limit `most`."""
    if value is not None and value > most:
        raise InputError(f"{name}: expected at most {most}, got {quote(value)}")


def check_sizes(config: Any) -> None:
    """Raise `InputError` for an integer above `SIZE`, or a dropout that is not a probability, in any part."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and field.name not in SEEDS:
                check_most(field.name, item, SIZE)
            if field.name.endswith("dropout") and isinstance(item, int | float) and not 0 <= item < 1:
                raise InputError(f"{field.name}: expected a probability in [0, 1), got {quote(item)}")
            if dataclasses.is_dataclass(item):
                check_sizes(item)


def check_deviation(initializer_range: float | None) -> None:
    """Raise `InputError` unless this is a valid standard deviation of initial weights."""
    if initializer_range is not None and not 0 <= initializer_range <= 1:
        raise InputError(f"initializer_range: expected a number from 0 to 1, got {quote(initializer_range)}")
