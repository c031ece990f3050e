"""Gymnasium's environments by their ids, with the spaces that polyformer's models read and choose from."""

import contextlib
from collections.abc import Iterator
from typing import Any

from polyformer.core.errors import InputError
from polyformer.data.minari_source import check_spaces


def gymnasium_library() -> Any:
    """The module `gymnasium`; `InputError` where it is not installed."""
    try:
        import gymnasium
    except ImportError as error:
        raise InputError(
            "gymnasium: environments need it, and it is not installed; pip install 'polyformer[agents]'"
        ) from error
    return gymnasium


def make_environment(name: str, options: dict[str, Any] | None = None) -> Any:
    """The environment of this id ("module:ID" imports the module first), made with `options`.

    Raises `InputError` for one that is unknown, cannot be made, or has other spaces.
    """
    library = gymnasium_library()
    try:
        environment = library.make(name, **(options or {}))
    except (library.error.Error, ImportError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"environment {name}: cannot be made ({reason:.200})") from error
    try:
        check_spaces(name, environment.observation_space, environment.action_space)
    except InputError:
        environment.close()
        raise
    return environment


@contextlib.contextmanager
def parallel(name: str, options: dict[str, Any], count: int) -> Iterator[Any]:
    """`count` of them, side by side as gymnasium's vector of environments."""
    library = gymnasium_library()
    environments = library.vector.SyncVectorEnv([lambda: make_environment(name, options)] * count)
    try:
        yield environments
    finally:
        environments.close()
