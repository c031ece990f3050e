"""The precision of a run: what "auto" means, and which float32 products are rounded."""

import pytest
import torch
from tiny_task import TinyModel, TinyTask

from polyformer.training.config import EngineConfig
from polyformer.training.engine import Engine
from polyformer.training.machine import choose_precision, tensor_float32


@pytest.mark.parametrize(
    ("precision", "device", "supported", "expected"),
    [
        ("auto", "cpu", True, "no"),
        ("auto", "cuda", True, "bf16"),
        ("auto", "cuda", False, "no"),
        ("no", "cuda", True, "no"),
        ("fp16", "cuda", True, "fp16"),
    ],
)
def test_the_precision_is_chosen_by_the_device(
    precision: str, device: str, supported: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert choose_precision(precision, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("precision", "before", "inside"),
    [("bf16", "highest", "high"), ("bf16", "medium", "medium"), ("no", "highest", "highest")],
)
def test_products_in_float32_are_rounded_only_in_a_run_that_rounds(
    precision: str, before: str, inside: str
) -> None:
    usual = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(before)
        with tensor_float32(precision, torch.device("cuda")):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(usual)


@pytest.mark.parametrize(("needed", "expected"), [(True, "no"), (False, "bf16")])
def test_a_task_may_need_float32_by_default(needed: bool, expected: str) -> None:
    class Exact(TinyTask):
        needs_float32 = needed

    engine = Engine(EngineConfig(device="cpu"))
    engine.precision = "bf16"  # as on a GPU
    engine.place_model(TinyModel(0.0, torch.float32), Exact())
    assert engine.precision == expected
