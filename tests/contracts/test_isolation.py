"""What a query may not see cannot reach it: NaN and infinity in keys and values, forward and backward."""

import pytest
import torch
from selection import patterns
from torch import Tensor

from pairwise import pairwise
from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Causal, Documents, Full, Padding, Pattern
from polyformer.core.sequence.context import Context

B, H, T, D = 2, 2, 37, 4
NAMED = [("Full", Full()), ("Causal", Causal()), *patterns(), ("own documents", Documents() & Padding())]


def contexts() -> list[Context]:
    torch.manual_seed(9)
    documents = torch.randint(0, 3, (B, T)).sort(1).values
    valid = torch.rand(B, T) > 0.2
    return [
        Context(T, T, causal=True),
        Context(T, T, q_doc=documents, kv_doc=documents, kv_valid=valid),
        Context(T, T, causal=True, kv_valid=valid),
    ]


def mask(pattern: Pattern, context: Context) -> Tensor:
    """Who sees whom, of pattern and context both, [B, H, T, T]."""
    whole = pattern & Documents() & Padding()
    whole = whole & Causal() if context.causal else whole
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(1, -1, 1, 1)
    return whole.mask(context, b, h, torch.arange(T).view(-1, 1), torch.arange(T)).expand(B, H, T, T)


def corrupted(dtype: torch.dtype, bad: Tensor, value: float) -> list[Tensor]:
    """q, k and v; `value` in the keys `bad`, in the values of the next of them, in both of the last."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(B, H, T, D, dtype=dtype) for _ in range(3))
    for index, key in enumerate(bad.tolist()):
        if index != 1:
            k[:, :, key, index % D] = value
        if index != 0:
            v[:, :, key, 0] = -value
    return [x.requires_grad_() for x in (q, k, v)]


BACKENDS = ["definition", "sdpa", "tiled", "auto"]


@pytest.mark.parametrize(
    ("named", "backend", "dtype"), pairwise(NAMED, BACKENDS, [torch.float64, torch.float32]), ids=str
)
def test_what_is_hidden_does_not_reach(named: tuple[str, Pattern], backend: str, dtype: torch.dtype) -> None:
    _, pattern = named
    bad = torch.tensor([20, 9, 33])
    for context in contexts():
        if context.causal and not pattern.causal():
            continue
        innocent = ~mask(pattern, context)[..., bad].any(-1)  # [B, H, T]
        clean, options = (
            corrupted(dtype, bad, 1.0),
            {"pattern": pattern, "context": context, "backend": backend},
        )
        expected = attend(*clean, **options)
        wanted = torch.autograd.grad((expected * innocent.unsqueeze(-1)).sin().sum(), clean)
        for value in (torch.nan, torch.inf):
            inputs = corrupted(dtype, bad, value)
            with torch.no_grad():
                for _ in range(1 + bool(value != value)):  # the second time as planned by the first
                    torch.testing.assert_close(attend(*inputs, **options)[innocent], expected[innocent])
            out = attend(*inputs, **options)
            torch.testing.assert_close(out[innocent], expected[innocent])
            seen = out[~innocent]
            assert not seen.numel() or not seen.isfinite().all(), "a query that sees it gets NaN"
            grads = torch.autograd.grad(out[innocent].sin().sum(), inputs)
            for ours, theirs in zip(grads, wanted):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["definition", "tiled"])
@pytest.mark.parametrize("masks", ["by score", "by pattern"])
def test_what_a_score_mod_hides_or_makes_infinite_does_not_reach(backend: str, masks: str) -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if masks == "by score":
            return torch.where(i >= j, s, -torch.inf)
        return s + (i - j).log()  # NaN for what the pattern masks, minus infinity for the token itself

    q, k, v = (x.detach() for x in corrupted(torch.float64, torch.tensor([20]), torch.nan))
    out = attend(q, k, v, pattern=Causal(), score_mod=mod, backend=backend)
    assert out[:, :, :20].isfinite().all()
    assert out[:, :, 21:].isnan().all()
    clean = attend(q[:, :, :20], k[:, :, :20], v[:, :, :20], pattern=Causal(), score_mod=mod, backend=backend)
    torch.testing.assert_close(out[:, :, :20], clean)
