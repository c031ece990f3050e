"""How large a configuration may say that something is: bounds against files that are made to exhaust memory.

They are far above any model that there is, and such that products of a few sizes fit into 64 bits.
"""

import dataclasses
from typing import Any

from polyformer.core.errors import InputError, quote

SIZE = 2**24
"""Of a width, a vocabulary, a number of positions, heads, experts, ...: 16,777,216."""

LAYERS = 4096
"""Of a stack."""

SEEDS = ("seed", "hash_seed")  # the integers that are no sizes


def check_sizes(config: Any) -> None:
    """Raises `InputError` for an integer above `SIZE`, or a dropout that is no probability, in any part."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and item > SIZE and field.name not in SEEDS:
                raise InputError(f"{field.name}: expected at most {SIZE}, got {quote(item)}")
            if field.name.endswith("dropout") and isinstance(item, int | float) and not 0 <= item < 1:
                raise InputError(f"{field.name}: expected a probability in [0, 1), got {quote(item)}")
            if dataclasses.is_dataclass(item):
                check_sizes(item)


def check_deviation(initializer_range: float | None) -> None:
    """Raises `InputError` unless initial weights can have this standard deviation."""
    if initializer_range is not None and not 0 <= initializer_range <= 1:
        raise InputError(f"initializer_range: expected a number from 0 to 1, got {quote(initializer_range)}")
