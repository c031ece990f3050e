"""No future reaches the past: by perturbation, by a shorter text, and by gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.subject import NotApplicableError, Subject, distance

SMALLEST = {"length": 2, "seen": 1}


def _start(n: int) -> list[dict[str, int]]:
    return [{"length": n, "seen": n // 3}, {"length": n, "seen": n - 1}]


def _need_causal(subject: Subject) -> None:
    if not subject.causal:
        raise NotApplicableError("the model reads both directions")


@check("future", "outputs change when later tokens change", _start, SMALLEST)
@torch.no_grad()
def future(subject: Subject, length: int, seen: int) -> Gap:
    """Replace all tokens after the first `seen`."""
    _need_causal(subject)
    x = subject.draw(1, length)
    other = torch.cat([x[:, :seen], subject.draw(1, length, seed=1)[:, seen:]], 1)
    return Gap(distance(subject.run(other)[:, :seen], subject.run(x)[:, :seen]), subject.rounding)


@check(
    "prefix",
    "a text's first tokens have other outputs than the same tokens in front of more",
    _start,
    SMALLEST,
)
@torch.no_grad()
def prefix(subject: Subject, length: int, seen: int) -> Gap:
    """Remove all tokens after the first `seen`."""
    _need_causal(subject)
    x = subject.draw(1, length)
    return Gap(distance(subject.run(x[:, :seen]), subject.run(x)[:, :seen]), subject.rounding)


@check("future gradients", "outputs have gradients by later tokens", _start, SMALLEST)
def future_gradients(subject: Subject, length: int, seen: int) -> Gap:
    """Differentiate the first `seen` outputs by the vectors of all tokens; later ones must be exactly 0."""
    _need_causal(subject)
    x = subject.draw(1, length)
    leaves, output = _by_vectors(subject, x)
    outputs = output[:, :seen].float().sin().sum()
    slopes = [s for s in torch.autograd.grad(outputs, leaves, allow_unused=True) if s is not None]
    if not any(slope.any() for slope in slopes):
        raise NotApplicableError("no table of tokens was found to differentiate by")
    past = max(float(slope[:, :seen].abs().max()) for slope in slopes)
    later = max(float(slope[:, seen:].abs().max()) for slope in slopes)
    return Gap(later / max(past, 1e-30), 0.0)


def _by_vectors(subject: Subject, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the vectors of the tokens as leaves of the graph, and the outputs."""
    if x.is_floating_point():
        return [x.requires_grad_()], subject.run(x)
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        ids = arguments[0] if arguments else None
        if isinstance(output, Tensor) and isinstance(ids, Tensor) and torch.equal(ids, x):
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]
        return None

    hooks = [part.register_forward_hook(cut) for part in subject.module.modules()]
    try:
        output = subject.run(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not leaves:
        raise NotApplicableError("no table of tokens was found to differentiate by")
    return leaves, output
