"""Whether a report of what became of weights is true of the tensors themselves."""

import torch
from torch import Tensor

from polyformer.core.ops.norms import CenteredRMSNorm
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import Report

FATES = ("copied", "scaled", "extended", "cut", "newly_initialized")


def checked(
    report: Report, old: Transformer, new: Transformer, begun: dict[str, Tensor] | None = None
) -> None:
    """Raises unless each tensor of `new` has one fate, and that one; `begun`: what it held before."""
    before, own = old.state_dict(), new.state_dict()
    fates = [name for fate in FATES for name in getattr(report, fate)]
    assert sorted(fates) == sorted(own), "each tensor has one fate"
    for name in report.copied:
        same = [item for item in before.values() if item.shape == own[name].shape]
        assert any(torch.equal(item, own[name]) for item in same), f"{name} is said to be copied"
    for name in report.scaled:
        centered = isinstance(new.get_submodule(name.rpartition(".")[0]), CenteredRMSNorm)
        scaled, unscaled = own[name] + centered, before[name] + centered
        assert not torch.equal(scaled, unscaled)
        torch.testing.assert_close(scaled, unscaled * (scaled.norm() / unscaled.norm()))
    for name in (*report.extended, *report.cut):
        rows = min(len(before[name]), len(own[name]))
        assert torch.equal(own[name][:rows], before[name][:rows])
    assert all(len(own[name]) > len(before[name]) for name in report.extended)
    assert all(len(own[name]) < len(before[name]) for name in report.cut)
    for name in report.newly_initialized:
        if begun is not None:
            assert torch.equal(own[name], begun[name]), f"{name} is said to be newly initialized"
        assert name not in before or not torch.equal(own[name], before[name]) or not own[name].any()
    kept = {*report.copied, *report.scaled, *report.extended, *report.cut}
    missing = set(before) - kept
    assert missing <= {*report.left, *old.unused_tensors} | {
        name for name in before if name.startswith("head.")
    }
