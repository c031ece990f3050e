"""What `explain` says is what runs: the leaves of a plan are the backends that `attend` calls."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.backends import definition, flex, sdpa
from polyformer.attention.functional.plan import BACKENDS
from polyformer.attention.mechanisms.spans import Spans
from polyformer.attention.patterns import Causal, Fixed, Full, Global, PerHead, Strided, Window
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context


@dataclasses.dataclass
class Call:
    """A call of `attend`, and the backends that it is expected to run."""

    runs: list[str]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    context: Callable[[], Context] | None = None
    length: int = 320
    heads: tuple[int, int] = (2, 2)

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """q, k and v that want gradients, and the rest with a context of its own."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, heads, self.length, 8) for heads in (*self.heads, self.heads[1])]
        q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
        context = {} if self.context is None else {"context": self.context()}
        return (q, k, v), {**self.options, **context}


def packed(*lengths: int, causal: bool = True) -> Callable[[], Context]:
    """Documents of these lengths in one row."""
    doc = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    return lambda: Context(sum(lengths), sum(lengths), causal=causal, q_doc=doc, kv_doc=doc)


CALLS = {
    "full": Call(["sdpa"]),
    "causal": Call(["sdpa"], {"pattern": Causal()}),
    "sparse": Call(["tiled"], {"pattern": Window(3)}, length=1024),
    "by name": Call(["definition"], {"pattern": Causal(), "backend": "definition"}),
    "two documents": Call(["sdpa", "sdpa"], context=packed(200, 120)),
    "documents, two-sided": Call(["sdpa"] * 3, context=packed(200, 60, 60, causal=False)),
    "documents with sums": Call(["tiled", "tiled"], {"return_lse": True}, packed(200, 120)),
    "short documents": Call(["sdpa"], context=packed(*[8] * 5), length=40),
    "documents by name": Call(["tiled"], {"backend": "tiled"}, packed(200, 120)),
    "score function": Call(["tiled"], {"score_mod": lambda score, b, h, i, j: score * 0.5}),
    "masks by head": Call(
        ["sdpa", "sdpa"], {"pattern": PerHead([Window(700), Full()])}, length=1500, heads=(2, 1)
    ),
    "shares by head": Call(
        ["tiled", "sdpa"],
        {"pattern": PerHead([*[Window(3)] * 3, Full()])},
        length=800,
        heads=(4, 2),
    ),
    "heads": Call(
        ["tiled", "sdpa"],  # one head alone is small enough for a mask
        {"pattern": PerHead([*[Window(3)] * 3, Window(5)])},
        length=800,
        heads=(4, 2),
    ),
    "heads together": Call(["tiled"], {"pattern": PerHead([Window(3), Window(5)])}, length=1024),
    "strided heads": Call(
        ["tiled", "tiled", "tiled"],
        {"pattern": PerHead([Window(3), Window(6, 0) | Strided(8)]), "backend": "tiled"},
    ),
    "strided": Call(["tiled"], {"pattern": Strided(4), "backend": "tiled"}),
    "dilated union": Call(
        ["tiled"] * 3, {"pattern": Window(2) | Window(2, dilation=3) | Strided(7), "backend": "tiled"}
    ),
    "strided documents": Call(
        ["tiled", "tiled"], {"pattern": Window(4, 0) | Strided(5), "backend": "tiled"}, packed(200, 120)
    ),
    "grouped queries": Call(["sdpa"], {"pattern": Fixed(8, 2)}, heads=(4, 2)),
    "grouped queries, strided": Call(
        ["tiled", "tiled"], {"pattern": Window(3) | Strided(64), "return_lse": True}, heads=(4, 2)
    ),
    "no query": Call([], {"pattern": Global(1)}, length=0),
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that run, as they run."""
    names: list[str] = []

    def watch(owner: Any, attribute: str, name: str) -> None:
        original = getattr(owner, attribute)

        def run(*arguments: Any) -> Any:
            names.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, attribute, run)

    watch(sdpa.Plan, "__call__", "sdpa")  # of `sdpa.run`, and where a plan is remembered
    for name in ("flex", "tiled", "definition"):
        watch(BACKENDS[name], "run", name)
    return names


def leaves(call: Call) -> list[str]:
    tensors, options = call.arguments()
    explained = explain(*tensors, **options)
    assert explained.backend == (" + ".join(dict.fromkeys(call.runs)) or "none")
    return [leaf.backend for leaf in explained.leaves]


@pytest.mark.parametrize("name", CALLS)
def test_the_leaves_are_what_runs(name: str, ran: list[str]) -> None:
    call = CALLS[name]
    assert leaves(call) == call.runs
    tensors, options = call.arguments()
    attend(*tensors, **options)
    assert ran == call.runs


@pytest.mark.parametrize("name", CALLS)
def test_the_leaves_are_what_runs_while_weights_are_recorded(name: str, ran: list[str]) -> None:
    call = CALLS[name]
    tensors, options = call.arguments()
    with recorded():
        explained = explain(*tensors, **options)
        attend(*tensors, **options)
    assert [leaf.backend for leaf in explained.leaves] == ran == ["definition"]


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_the_leaves_are_what_runs_where_calls_repeat(name: str, ran: list[str]) -> None:
    """Without gradients a context remembers how its calls run; the second may not differ from the first."""
    tensors, options = CALLS[name].arguments()
    explained = [leaf.backend for leaf in explain(*tensors, **options).leaves]
    for _ in range(2):
        ran.clear()
        attend(*tensors, **options)
        assert ran == explained


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace.*:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.parametrize("name", ["full", "sparse", "score function", "two documents"])
def test_the_leaves_are_what_runs_while_a_graph_is_made(name: str, ran: list[str]) -> None:
    tensors, options = CALLS[name].arguments()
    explained: list[str] = []

    def traced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        explained.extend(leaf.backend for leaf in explain(q, k, v, **options).leaves)
        ran.clear()
        return attend(q, k, v, **options)

    torch.jit.trace(traced, [x.detach() for x in tensors], check_trace=False)
    assert ran == explained


def test_a_compiled_call_is_explained_where_it_is_compiled() -> None:
    q, k, v = (torch.randn(1, 2, 320, 8) for _ in range(3))
    context = packed(200, 120)()

    def names(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
        return [leaf.backend for leaf in explain(q, k, v, context=context).leaves]

    assert names(q, k, v) == ["sdpa", "sdpa"]
    compiled = torch.compile(names, backend="eager", fullgraph=True)
    assert compiled(q, k, v) == ["sdpa"], "one mask: documents are not read while a graph is made"


def test_flex_runs_heads_and_residue_classes_in_parts(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "refuses", lambda request: None)
    run = flex.run  # which counts
    monkeypatch.setattr(flex, "run", lambda request: run(request) if False else definition.run(request))
    for pattern, parts in ((PerHead([Window(3), Window(5)]), 2), (Window(3) | Strided(8), 2)):
        tensors, _ = Call([]).arguments()
        explained = explain(*tensors, pattern=pattern, backend="flex")
        assert [leaf.backend for leaf in explained.leaves] == ["flex"] * parts
        ran.clear()
        attend(*tensors, pattern=pattern, backend="flex")
        assert ran == ["definition"] * parts


def test_flex_computes_heads_with_a_table_of_spans_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "refuses", lambda request: None)
    for calls in (CALLS["heads"], CALLS["heads together"]):
        tensors, _ = calls.arguments()
        spans = Spans(tuple((64 * head,) for head in range(tensors[0].shape[1])))
        for pattern in (spans, spans & Causal()):
            assert str(explain(*tensors, pattern=pattern, backend="flex")) == "flex (first choice)"
        monkeypatch.setattr(flex, "EVALUATED", 1)
        assert str(explain(*tensors, pattern=spans, backend="flex")).startswith("by head")
        monkeypatch.undo()
        monkeypatch.setattr(flex, "refuses", lambda request: None)


def test_heads_of_which_one_returns_no_sums_are_joined() -> None:
    """Three heads run tiled, which returns log-sum-exps unasked, the other in SDPA, which has none."""
    call = CALLS["heads"]
    tensors, options = call.arguments()
    expected = attend(*tensors, **options, backend="definition")
    torch.testing.assert_close(attend(*tensors, **options), expected)


def test_a_simple_call_is_explained_in_a_line() -> None:
    tensors, options = CALLS["full"].arguments()
    assert str(explain(*tensors, **options)) == "sdpa (first choice)"
    tensors, options = CALLS["no query"].arguments()
    assert str(explain(*tensors, **options)) == "nothing to compute (there is no query)"


def test_parts_are_explained_as_a_tree() -> None:
    tensors, options = CALLS["documents, two-sided"].arguments()
    assert str(explain(*tensors, **options)) == (
        "by document\n    3 documents of 60 to 200 tokens: sdpa (first choice)"
    )
    tensors, options = CALLS["strided heads"].arguments()
    assert str(explain(*tensors, **options)) == (
        "by head\n"
        "    head 0: tiled (first choice)\n"
        "    head 1: by residue class, joined by log-sum-exp\n"
        "        steps 1, 8: tiled (first choice)"
    )


def test_what_cannot_run_cannot_be_explained() -> None:
    with pytest.raises(InputError, match="backend 'flex' cannot take this call"):
        explain(*CALLS["full"].arguments()[0], backend="flex", return_lse=True)
