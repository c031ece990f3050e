"""Outputs depend on the past, on the own document and on the own row only."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.subject import NotApplicableError, Subject

Outputs = tuple[Tensor, Tensor]


def _split(n: int) -> Iterator[tuple[int, int]]:
    yield from ((n, n // 3), (n, n - 1))


def _causal_input(subject: Subject, length: int) -> Tensor:
    if not subject.causal:
        raise NotApplicableError("the model reads both directions")
    return subject.draw(1, length)


@check("outputs change when later tokens change", _split)
def future(subject: Subject, length: int = 2, seen: int = 1) -> Outputs:
    """Replace all tokens after the first `seen`."""
    x = _causal_input(subject, length)
    other = torch.cat([x[:, :seen], subject.draw(1, length, seed=1)[:, seen:]], 1)
    return subject.run(other)[:, :seen], subject.run(x)[:, :seen]


@check("a text's first tokens have other outputs than the same tokens in front of more", _split)
def prefix(subject: Subject, length: int = 2, seen: int = 1) -> Outputs:
    """Remove all tokens after the first `seen`."""
    x = _causal_input(subject, length)
    return subject.run(x[:, :seen]), subject.run(x)[:, :seen]


@check("outputs have gradients by later tokens", _split, gradients=True)
def future_gradients(subject: Subject, length: int = 2, seen: int = 1) -> Gap:
    """Differentiate the first `seen` outputs by the vectors of all tokens; later ones must be exactly 0."""
    leaves, output = _by_vectors(subject, _causal_input(subject, length))
    outputs = output[:, :seen].float().sin().sum()
    slopes = torch.autograd.grad(outputs, leaves, allow_unused=True) if leaves else ()
    slopes = [slope for slope in slopes if slope is not None]
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

    with subject.hooked(cut):
        return leaves, subject.run(x)


@check("documents packed in a row have other outputs than in separate rows", lambda n: [(n // 3, n - n // 3)])
def packing(subject: Subject, first: int = 1, second: int = 1) -> Outputs:
    """Pack two documents by `document_ids`."""
    subject.needs("document_ids")
    x = subject.draw(1, first + second)
    documents = torch.tensor([[0] * first + [1] * second], device=x.device)
    parts = [
        subject.run(part, document_ids=documents[:, : part.shape[1]] * 0)
        for part in x.split([first, second], 1)
    ]
    return subject.run(x, document_ids=documents), torch.cat(parts, 1)


@check("a row's outputs change when other rows change", lambda n: [(3, n // 2)], whole_rows=True)
def rows(subject: Subject, rows: int = 2, length: int = 1) -> Outputs:
    """Replace all rows except the last: capacity is often taken by the first rows."""
    x, other = subject.draw(rows, length), subject.draw(rows, length, seed=1)
    other[-1] = x[-1]
    return subject.run(other)[-1], subject.run(x)[-1]


@check("a row's outputs differ from its outputs in a batch of 1", lambda n: [(3, n // 2)], whole_rows=True)
def batch_size(subject: Subject, rows: int = 2, length: int = 1) -> Outputs:
    """Compare each row with itself in a batch of 1."""
    x = subject.draw(rows, length)
    return subject.run(x), torch.cat([subject.run(row.unsqueeze(0)) for row in x])


@check(
    "equal rows have different outputs: experts leak between rows", lambda n: [(6, n // 2)], whole_rows=True
)
def experts(subject: Subject, rows: int = 2, length: int = 1) -> Outputs:
    """Repeat a row, so that all rows choose the same experts, and compare with a batch of 1."""
    names = (f"{name} {type(part).__name__}".lower() for name, part in subject.module.named_modules())
    if not any(word in name for name in names for word in ("expert", "router", "moe")):
        raise NotApplicableError("the model has no part with expert, router or moe in its name")
    x = subject.draw(1, length)
    output = subject.run(x.repeat(rows, *[1] * (x.dim() - 1)))
    return output, subject.run(x).expand_as(output)
