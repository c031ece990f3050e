"""Every pattern in compiled FlexAttention, with documents and padding: its code, and its results."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import dense, random_context
from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.backends import flex
from polyformer.attention.mechanisms.spans import Spans
from polyformer.attention.patterns import Blockwise, GlobalEnd, Links, Pattern, PerHead
from polyformer.attention.patterns.base import TabulatedPattern
from polyformer.attention.patterns.call_parts import InPart, InResidueClass
from polyformer.attention.patterns.global_base import DocumentEndPattern, GlobalKeys
from polyformer.core.sequence.context import Context
from registered import EVERYTHING, registered

QUERIES, KEYS = 131, 150


def cases(everything: bool = EVERYTHING) -> list[Any]:
    """Instances of all patterns, and of the patterns that mechanisms use."""
    instances = [
        pattern
        for cls in registered(Pattern.registry)
        for pattern in (cls.examples() if everything else cls.examples()[:1])
    ]
    instances += [Spans(((5, 60, 90), (9, 10, 70)), 64), Spans(((40,),))]
    instances += [GlobalKeys(GlobalEnd(3)), Blockwise(2, (1, 2, 0))]
    # The table of the example ends before the first query.
    instances += [Links(40, ((0,), (0, 2), (), (1, 3)))]
    return [pytest.param(pattern, id=str(pattern)) for pattern in instances]


def lowered_cases() -> list[Any]:
    """Patterns without tables, a head for each in one kernel; every night each in a kernel of its own."""
    patterns = [case.values[0] for case in cases() if not has_tables(case.values[0])]
    if EVERYTHING:
        return [pytest.param(pattern, id=str(pattern)) for pattern in patterns]
    return [pytest.param(PerHead(tuple(patterns)), id="all")]


def compiled_cases() -> list[Any]:
    """Patterns with tables, a head for each in one kernel: compiling takes seconds.

    A pattern with numbers per head stays apart. The suite of every night compiles all patterns, separately.
    """
    if EVERYTHING:
        return cases()
    patterns = [case.values[0] for case in cases() if has_tables(case.values[0])]
    apart = [pattern for pattern in patterns if isinstance(pattern, Spans) and len(pattern.spans) > 1]
    together = PerHead(tuple(pattern for pattern in patterns if pattern not in apart))
    return [pytest.param(together, id="all"), *(pytest.param(each, id=str(each)) for each in apart)]


def has_tables(pattern: Pattern) -> bool:
    return isinstance(pattern, (TabulatedPattern, DocumentEndPattern, GlobalKeys))


def context_for(device: str = "cpu") -> Context:
    torch.manual_seed(0)
    context = random_context(2, QUERIES, KEYS, documents=True, padding=True)
    tables = {name: x.to(device) for name, x in vars(context).items() if isinstance(x, Tensor)}
    return dataclasses.replace(context, memo={}, **tables)


needs_compiler = pytest.mark.skipif(
    flex._lacks() is not None, reason="FlexAttention on a CPU needs AVX2 and a C++ compiler"
)
warns = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class LoweredError(Exception):
    """The mask became code: all that is left is to compile the code."""


@needs_compiler
@warns
@torch.no_grad()
@pytest.mark.parametrize("pattern", lowered_cases())
def test_patterns_can_be_lowered(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule that Inductor translates for a single pair is the same for a CPU and for CUDA.

    Patterns with tables are compiled, below.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def stop(*args: object) -> None:
        raise LoweredError

    monkeypatch.setattr(GraphLowering, "codegen", stop)
    torch._dynamo.reset()
    heads = len(pattern.patterns) if isinstance(pattern, PerHead) else 2
    inputs = torch.randn(2, heads, QUERIES, 16), *torch.randn(2, 2, heads, KEYS, 16).unbind()
    with config.patch(fx_graph_cache=False), pytest.raises(Exception, match="LoweredError"):
        attend(*inputs, pattern=pattern, context=context_for(), backend="flex")
    torch._dynamo.reset()


@needs_compiler
@warns
@torch.no_grad()
@pytest.mark.parametrize("pattern", compiled_cases())
def test_compiled_patterns_agree_on_a_cpu(pattern: Pattern) -> None:
    context = context_for()
    heads = max(2, len(pattern.patterns)) if isinstance(pattern, PerHead) else 2
    inputs = torch.randn(2, heads, QUERIES, 16), *torch.randn(2, 2, heads, KEYS, 16).unbind()
    ours, expected = (
        attend(*inputs, pattern=pattern, context=context, backend=name) for name in ("flex", "definition")
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", cases(everything=True))
def test_lookups_in_tables_are_the_rule(pattern: Pattern) -> None:
    """Also as a part of a larger call, and among the tokens of a residue class."""
    context = context_for()
    part = Context(20, 30)
    for outer in (pattern, InPart(pattern, context, 4, 5), InResidueClass(pattern, context, 3)):
        inner = context if outer is pattern else part
        lookups = outer.with_tables(inner, torch.device("cpu"))
        assert torch.equal(dense(lookups, inner, 2, 2), dense(outer, inner, 2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled FlexAttention needs a CUDA device")
@pytest.mark.parametrize("pattern", cases())
def test_compiled_patterns_agree_on_cuda(pattern: Pattern) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(2, 2, n, 32, dtype=torch.float64).requires_grad_() for n in (QUERIES, KEYS, KEYS)]
    ours = [x.detach().to("cuda", torch.float32).requires_grad_() for x in exact]
    results = []
    for inputs, backend in ((ours, "flex"), (exact, "definition")):
        context = context_for(inputs[0].device.type)
        out = attend(*inputs, pattern=pattern, context=context, backend=backend)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-3, atol=1e-3)
