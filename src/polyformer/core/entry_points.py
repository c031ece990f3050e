"""Members in installed packages, found by an entry point of the group `polyformer.members`.

    [project.entry-points."polyformer.members"]
    my-package = "my_package.members"

The module is imported when a registry looks up a name that it does not have, or lists all names; never by
`import polyformer`.
"""

import functools
import importlib.metadata
import threading
import warnings

GROUP = "polyformer.members"

_lock = threading.RLock()
_started = False


def load_installed() -> None:
    """Import the installed members, once; a package that fails is named in a warning and left out."""
    global _started
    with _lock:  # other threads wait; an imported module may look up members too
        if _started:
            return
        _started = True
        for point in _entry_points():
            try:
                point.load()
            except Exception as error:  # code of other packages may raise anything
                package = point.dist.name if point.dist else point.name
                warnings.warn(
                    f"the members of the installed package {package} are left out: importing {point.value} "
                    f"failed with {type(error).__name__}: {error}",
                    stacklevel=2,
                )


def installed_modules() -> frozenset[str]:
    """Return the top-level modules of installed packages that define members."""
    return frozenset(point.value.partition(":")[0].partition(".")[0] for point in _entry_points())


@functools.cache
def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=GROUP))
