"""Formatting of numbers with their units."""


def format_bytes(number: float) -> str:
    """Return a number of bytes with a unit; 1 MB is 10^6 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.4g} TB"
