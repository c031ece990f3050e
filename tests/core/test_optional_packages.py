"""A missing package of an extra is named, with the way to install it."""

import pytest

from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra


def test_a_missing_package():
    with pytest.raises(InputError) as error, needs_extra("plot", "plot: drawing needs it"):
        import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401
    assert str(error.value) == "plot: drawing needs it; pip install 'polyformer[plot]'"
    assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_another_way():
    with (
        pytest.raises(InputError, match=r"; pip install 'polyformer\[plot\]', or leave it out$"),
        needs_extra("plot", "plot: drawing needs it", "or leave it out"),
    ):
        raise ImportError


def test_other_errors_pass():
    with pytest.raises(OSError, match="disk"), needs_extra("plot", "plot: drawing needs it"):
        raise OSError("disk")
