"""Memory in pages of 2 MiB, if the system supports them.

The addresses of 4 KiB pages do not fit into a core's TLB, so a loop over hundreds of megabytes would need an
address look-up every few cache lines.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

ADVISE, COLLAPSE = 14, 25
"""Linux's MADV_HUGEPAGE, for future pages, and MADV_COLLAPSE (Linux 6.1), for existing pages."""

PAGE = 1 << 21


def use_huge_pages(address: int, size: int) -> None:
    """Request huge pages for `size` bytes at `address`; the content never changes."""
    start, stop = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    madvise = _madvise()
    if madvise is not None and start < stop:
        for advice in (ADVISE, COLLAPSE):
            madvise(start, stop - start, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
