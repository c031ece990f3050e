"""Cosines and sines by both libraries."""

import pytest
import torch

from polyformer.core.ops import sines
from polyformer.core.ops.sines import Sines, cosines_and_sines


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_libraries_say_the_same(library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sines, "SECTION", lambda: Sines(library=library))
    a = torch.linspace(-300, 300, 3 * 5 * 7, dtype=dtype).view(3, 5, 7)[:, ::2]
    expected = torch.cat([a.double().cos(), a.double().sin()], -1).to(dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(cosines_and_sines(a), expected, rtol=4 * eps, atol=eps)


def test_angles_without_an_end_are_no_number():
    out = cosines_and_sines(torch.tensor([[torch.inf, 0.0]]))
    assert out.isnan().tolist() == [[True, False, True, False]]


def test_the_choice_is_measured_in_time():
    assert sines.SECTION.measured().library in ("torch", "numpy")
