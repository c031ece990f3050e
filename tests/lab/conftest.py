"""Shared by the tests of the laboratory: benches measure this machine by a product that takes no time."""

import math

import pytest

from polyformer_lab.bench import running

SMALL = 8, 16, 32


@pytest.fixture(autouse=True)
def _small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no bench compute products of 8.6 GFLOP: a second or more of each test, and no test reads it."""
    monkeypatch.setattr(running, "PRODUCT", SMALL)
    monkeypatch.setattr(running, "PRODUCT_FLOP", 2.0 * math.prod(SMALL))
