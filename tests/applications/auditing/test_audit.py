"""Audits name published faults, raise no alarm without them, and repeat, accept and report findings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_modules import (
    WIDTH,
    CausalFromTheTopLeft,
    ChunkedWindow,
    ExpertCapacity,
    Faulty,
    IgnoredNumberOfLabels,
    PackedLinearAttention,
    RotaryUnderPadding,
    SharedCache,
    UnmaskedConvolution,
)
from torch import Tensor, nn

import polyformer
from polyformer.applications.audit import accepted_deviations, measure
from polyformer.applications.audit.architectures import random_model
from polyformer.core.errors import InputError
from polyformer.models.attached.architectures import ARCHITECTURES
from registered import nightly

FAULTS: dict[type[nn.Module], set[str]] = {
    PackedLinearAttention: {"packing"},
    ChunkedWindow: {"chunks"},
    UnmaskedConvolution: {"padding content", "left padding"},
    IgnoredNumberOfLabels: {"accumulation"},
    RotaryUnderPadding: {"padded chunks"},
    CausalFromTheTopLeft: {"chunks", "beams"},
    ExpertCapacity: {"rows", "batch size", "experts"},
    SharedCache: {"beams"},
}
"""By module: the checks that must find its fault, and no others."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_published_faults_are_named_and_repeat(fault: type[Faulty]):
    options: dict[str, Any] = {} if fault is IgnoredNumberOfLabels else {"width": WIDTH}
    report = polyformer.audit(fault(), None, **options)
    assert {result.check for result in report.findings} == FAULTS[fault]
    assert report.status == 1
    for result in report.findings:
        sizes: dict[str, Any] = {**options, **result.sizes}
        gap = measure(fault(), result.check, **sizes)
        assert gap.exceeds
        assert gap.figure == result.figure
    right = polyformer.audit(fault(right=True), **options)
    assert not right.findings, str(right)
    assert FAULTS[fault] <= {result.check for result in right.of("passed")}


class Noisy(Faulty):
    """Faults that are not among the published: a future, noise, overflow, NaN, and a parameter not saved."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return x with all faults."""
        q, k, _ = self.project(x)
        mask = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask
        scores = (q @ k.mT).masked_fill(~mask.bool().unsqueeze(1), -torch.inf)
        rounded = (q * 300).square().to(torch.float16 if x.dtype == torch.float16 else x.dtype)
        return scores.softmax(-1) @ x + 1e-4 * torch.rand(x.shape[0], 1, 1) + rounded / 1e5

    def state_dict(self, *arguments: object, **options: object) -> dict[str, Tensor]:
        """Return rounded parameters."""
        return {name: value.round(decimals=3) for name, value in super().state_dict().items()}


def test_other_faults_are_named():
    checks = "future", "future gradients", "seed", "empty row", "saving", "float16"
    report = polyformer.audit(Noisy(), width=WIDTH, checks=checks)
    assert {result.check for result in report.findings} == set(checks)


def test_the_smallest_input_is_minimal():
    report = polyformer.audit(UnmaskedConvolution(), width=WIDTH, checks=["left padding"])
    (result,) = report.findings
    assert result.sizes == {"length": 1, "left": 1}
    assert result.code.endswith("measure(model, 'left padding', length=1, left=1)")


NIGHTLY = "Llama", "GptOss", "Bart", "ViT"


@nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_architectures_have_the_findings_of_the_table(name: str):
    """GPT-OSS attends across packed documents, and BART counts padding on the left and ignores the number
    of labels in transformers 5.23."""
    expected = {"GptOss": {"packing"}, "Bart": {"left padding", "accumulation"}}
    (row,) = (row for row in ARCHITECTURES if row.name == name)
    assert {result.check for result in polyformer.audit(random_model(row)).findings} == expected.get(
        name, set()
    )


def test_a_model_of_the_library_passes():
    model = polyformer.create_model("decoder-tiny", attention="Window(3)").train()
    report = polyformer.audit(model)
    assert not report.findings, str(report)
    assert {result.check for result in report.of("not applicable")} == {"experts"}
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_accepted_deviations(tmp_path: Path):
    file = tmp_path / "accept.yaml"
    file.write_text("left padding: padded on the right only\npadding content: as above\n")
    report = polyformer.audit(UnmaskedConvolution(), width=WIDTH, accept=accepted_deviations(file))
    assert report.status == 0
    assert {result.check for result in report.of("accepted")} == FAULTS[UnmaskedConvolution]
    for text, message in (
        ("biems: x", "did you mean 'beams'"),
        ("beams: ", "reason"),
        ("- beams", "lines of"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            accepted_deviations(file)
