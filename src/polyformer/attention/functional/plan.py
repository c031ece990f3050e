"""Plans of calls: a leaf is a single run of a backend, a branch splits the call and joins the results."""

import dataclasses
from types import ModuleType
from typing import TypeAlias

import torch

from polyformer.attention.functional.backends import blocks, definition, flex, sdpa
from polyformer.attention.functional.backends.blocks import QueryBlocks, current_graph_calls
from polyformer.attention.functional.backends.tiled import run as tiled
from polyformer.attention.functional.context_parallel import (
    STRATEGIES,
    choose_strategy,
    numbered,
    part_request,
)
from polyformer.attention.functional.isolation import empty, run_isolated
from polyformer.attention.functional.key_exchange import Needs
from polyformer.attention.functional.request import Request, is_traced
from polyformer.attention.functional.splits import Result, Split, by_document, by_head, by_residue_class
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.instrumentation import installed
from polyformer.core.ops.softmax import recording
from polyformer.core.sequence.context import Context

BACKENDS: dict[str, ModuleType] = {"sdpa": sdpa, "flex": flex, "tiled": tiled, "definition": definition}
"""Backends in the order in which `auto` tries them.

Each module has `refuses(request)` and `run(request)`.
"""

TRACED = 1 << 26
"""Number of scores up to which a call inside `torch.compile` is dense instead of breaking the graph."""


@dataclasses.dataclass(frozen=True, eq=False)
class Nothing:
    """A call without batch rows or queries: no backend runs."""

    request: Request = dataclasses.field(repr=False)

    backend = "none"
    leaves = ()

    def run(self) -> Result:
        """Return an empty output."""
        out = empty(self.request.q, self.request.k, self.request.v)
        return out, out.new_empty(out.shape[:3])

    def __str__(self) -> str:
        return "nothing to compute (there is no query)"


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """A single run of a backend; `reasons` has the reasons against the backends that were tried before."""

    request: Request = dataclasses.field(repr=False)
    backend: str
    reasons: dict[str, str]

    @property
    def leaves(self) -> "tuple[Leaf, ...]":
        """Return a tuple with only this leaf."""
        return (self,)

    def run(self) -> Result:
        """Return output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq], which some backends always compute."""
        return BACKENDS[self.backend].run(self.request)

    def __str__(self) -> str:
        passed = "; ".join(f"not {name}: {why}" for name, why in self.reasons.items())
        how = tiled.details(self.request) if self.backend == "tiled" else ""
        return f"{self.backend} ({passed or 'first choice'}{how and '; ' + how})"


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A call that is split into several calls with separate plans."""

    split: Split
    plans: "tuple[Plan, ...]"

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Return all runs of backends, in their order."""
        return tuple(leaf for plan in self.plans for leaf in plan.leaves)

    @property
    def backend(self) -> str:
        """Return the names of the backends, such as "sdpa + tiled"."""
        return " + ".join(dict.fromkeys(leaf.backend for leaf in self.leaves))

    def run(self) -> Result:
        """Run the parts in turn and join their results."""
        outs, lses = zip(*(plan.run() for plan in self.plans))
        return self.split.join(outs, lses)

    def __str__(self) -> str:
        """Return a tree as text; parts with equal plans shard a line."""
        same: dict[str, list[int]] = {}
        for index, plan in enumerate(self.plans):
            same.setdefault(str(plan), []).append(index)
        lines = [self.split.name]
        for text, indices in same.items():
            lines += f"{self.split.label(indices)}: {text}".split("\n")
        return "\n    ".join(lines)


@dataclasses.dataclass(frozen=True, eq=False)
class ContextParallel:
    """A call of the queries of a process, for which the processes of a group exchange keys.

    Each part of the call then has a separate plan.

    Args:
        needs: the keys that each process needs.
        strategy: the method of the exchange.
        reason: the reason for this method.
    """

    request: Request = dataclasses.field(repr=False)
    needs: Needs = dataclasses.field(repr=False)
    strategy: str
    reason: str

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Return all runs of backends after the exchange of keys."""
        return tuple(leaf for part in self._parts() for leaf in part.leaves)

    @property
    def backend(self) -> str:
        """Return the names of the backends, such as "sdpa + tiled"."""
        return " + ".join(dict.fromkeys(leaf.backend for leaf in self.leaves))

    @property
    def bytes_received(self) -> int:
        """Return the bytes of keys and values that the forward pass receives from other processes.

        The backward pass sends the same number of bytes of gradients back.
        """
        k, v = self.request.k, self.request.v
        number = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
        return self.received * number

    @property
    def received(self) -> int:
        """Return the number of keys that this process receives."""
        shard = self.needs.shard.key_shard
        if self.strategy == "ring":
            return sum(stop - start for runs in shard.runs for start, stop in runs) - shard.length
        return self.needs.received(shard.rank)

    def run(self) -> Result:
        """Exchange the keys and compute the parts."""
        return STRATEGIES[self.strategy](self.request, self.needs, self._compute)

    def _compute(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run_isolated(request, lambda part: plan(part).run())
        assert lse is not None, "parts are joined by it"
        return out, lse

    def _parts(self) -> "list[Plan]":
        plans: list[Plan] = []
        rank, k, v = self.needs.shard.rank, self.request.k, self.request.v
        for first, part in numbered(self.needs.parts[rank]):
            for span in part.spans():
                number = span[1] - span[0]
                # A plan depends only on shapes: expanded tensors of a single number take no memory.
                keys, values = (x.new_empty(1).expand(*x.shape[:2], number, x.shape[3]) for x in (k, v))
                request = part_request(self.request, first, part, span, keys, values)
                plans.append(plan(request))
        return plans

    def __str__(self) -> str:
        peers = len(self.needs.keys) - 1
        head = f"spread over {peers + 1} processes: {self.strategy} ({self.reason}); "
        head += f"{self.received} keys from others, "
        lines = [f"{head}{self.bytes_received} bytes"]
        for part in self._parts():
            lines += str(part).split("\n")
        return "\n    ".join(lines)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphLeaf:
    """A run in an exported graph for texts of any length: in blocks, or else dense for the reason `dense`."""

    request: Request = dataclasses.field(repr=False)
    blocks: QueryBlocks | None
    dense: str = ""

    leaves = ()
    backend = "blocks"

    def run(self) -> Result:
        """Return the output, and the log-sum-exp if it is computed."""
        request = self.request
        if self.blocks is not None:
            return blocks.run(request, self.blocks)
        changed = request.score_mod is not None or request.relative is not None
        return (definition if changed or request.return_lse else sdpa).run(request)

    def __str__(self) -> str:
        return f"dense ({self.dense})" if self.blocks is None else str(self.blocks)


Plan: TypeAlias = Nothing | Leaf | Branch | ContextParallel | GraphLeaf


def plan(request: Request) -> Plan:
    """Return the plan of a request: by its backend, or by the first that can run it, split if that is faster.

    If other layers repeat the call (`request.repeats`), a shared mask costs less than a split call.
    """
    if torch.compiler.is_exporting() and (calls := current_graph_calls()) is not None:
        leaf = for_any_length(request)
        calls.plans.append(str(leaf))
        return leaf
    if request.context.shard is not None:
        refuse_recording(request.context)
        # Parts over different keys are joined by log-sum-exp.
        return ContextParallel(dataclasses.replace(request, return_lse=True), *choose_strategy(request))
    if not (request.q.shape[0] and request.q.shape[2]) and not recording():
        return Nothing(request)
    leaf = choose(request) if request.repeats else None
    if leaf is not None and leaf.backend == "sdpa":
        return leaf
    # Splitting reads the values of index tensors, which would break a compiled graph.
    by_doc = request.context.q_doc is not None and request.backend == "auto" and not recording()
    if by_doc and not torch.compiler.is_compiling() and (split := by_document(request)) is not None:
        return _branch(split)
    leaf = leaf or choose(request)
    by_parts = leaf.backend in ("tiled", "flex") and not torch.compiler.is_compiling()
    if by_parts and not BACKENDS[leaf.backend].refuses(dataclasses.replace(request, return_lse=True)):
        together = flex.can_join_heads(request) if leaf.backend == "flex" else request.groups == 1
        split = by_head(request, together) or by_residue_class(request)
        if split is not None:
            return _branch(split)
    return leaf


def for_any_length(request: Request) -> GraphLeaf:
    """Return a run that does not depend on lengths, for an exported graph."""
    chosen = blocks.choose(request)
    return GraphLeaf(request, None, chosen) if isinstance(chosen, str) else GraphLeaf(request, chosen)


def refuse_recording(context: Context) -> None:
    """Raise `InputError` if weights are recorded while a sequence is spread over processes."""
    if context.shard is not None and recording():
        raise InputError(
            "output_attentions: weights cannot be recorded while a sequence is spread over processes; "
            "run on one process"
        )


def _branch(split: Split) -> Branch:
    """Return a split call with the plans of its parts."""
    requests = (
        dataclasses.replace(part, return_lse=part.return_lse or split.needs_lse, repeats=False)
        for part in split.requests
    )
    return Branch(split, tuple(map(plan, requests)))


def choose(request: Request) -> Leaf:
    """Return a run of the request's backend or, for "auto", of the first backend that can run it.

    While weights are recorded, the backend is always `definition`.
    """
    backend = request.backend
    if backend != "auto" and backend not in BACKENDS:
        raise unknown("backend", backend, ["auto", *BACKENDS])
    candidates = BACKENDS if backend == "auto" else [backend]
    if installed and recording():
        others = [name for name in candidates if name != "definition"]
        return Leaf(request, "definition", dict.fromkeys(others, "attention weights are being recorded"))
    reasons: dict[str, str] = {}
    for name in candidates:
        why = _passed_over(name, request) if backend == "auto" else None
        why = why or BACKENDS[name].refuses(request)
        if why is None:
            return Leaf(request, name, reasons)
        reasons[name] = why
    raise InputError(f"backend {quote(backend)} cannot take this call: {reasons[backend]}; use 'auto'")


def _passed_over(name: str, request: Request) -> str | None:
    """Return why `auto` skips a backend that could run the request, or None."""
    if name == "flex":
        return flex.passed_over(request)
    if name == "tiled" and is_traced() and request.pairs <= TRACED:
        return "it would break the graph, and so few scores can be computed at once"
    return None
