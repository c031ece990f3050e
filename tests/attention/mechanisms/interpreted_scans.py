"""Compare the kernels with the scan in float64: `python interpreted_scans.py RULE`, in Triton's interpreter.

Prints a line of JSON for each case: the largest difference of outputs, state and gradients, relative to the
largest number of each.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import triton_interpreter  # noqa: F401 - before any module with kernels
from polyformer.attention.mechanisms import MechanismConfig
from polyformer.attention.mechanisms.recurrence import fused_scan
from polyformer.attention.mechanisms.recurrence.rank_one import RankOneInputs, rank_one_scan
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs, chunked_scan
from polyformer.core.sequence.context import Context

BATCH, HEADS, KEY, VALUE = 2, 2, 8, 5
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=GENERATOR)


def scan_inputs(length: int, channels: int, erases: bool) -> dict[str, Tensor]:
    """Random tokens with unit keys."""
    keys = normal(BATCH, HEADS, length, KEY)
    tables = {
        "q": normal(BATCH, HEADS, length, KEY),
        "k": keys / keys.norm(dim=-1, keepdim=True),
        "v": normal(BATCH, HEADS, length, VALUE),
    }
    if channels:
        tables["decay"] = -uniform(BATCH, HEADS, length, channels)
    if erases:
        tables["erase"] = uniform(BATCH, HEADS, length, 1)
    return tables


def with_gradients(
    run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """The outputs, and the gradients of their weighted sum."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = run(*inputs)
    total = sum((y * w.to(y.dtype)).sum() for y, w in zip(outputs, weights, strict=True))
    gradients = torch.autograd.grad(total, inputs)
    return [*(y.detach() for y in outputs), *gradients]


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((x.double() - y).abs().max() / y.abs().max().clamp_min(1e-3)) for x, y in pairs)


def scans(channels: int, erases: bool) -> Iterator[dict[str, Any]]:
    """The rule with and without documents: a single token, a few, and more than a chunk."""
    for length in (1, 5, 70):
        for packed in (False, True):
            tables = scan_inputs(length, channels, erases)
            starts = uniform(BATCH, length) < 0.1 if packed else None
            state = normal(BATCH, HEADS, KEY, VALUE)
            weights = [normal(BATCH, HEADS, length, VALUE), normal(BATCH, HEADS, KEY, VALUE)]
            names, values = list(tables), [*tables.values(), state]

            def chunks(*xs: Tensor, names: list[str] = names, starts: Tensor | None = starts) -> Any:
                return chunked_scan(
                    ScanInputs(**dict(zip(names, xs[:-1], strict=True)), starts=starts), xs[-1]
                )

            def fused(*xs: Tensor, names: list[str] = names, starts: Tensor | None = starts) -> Any:
                tokens = ScanInputs(**dict(zip(names, xs[:-1], strict=True)), starts=starts)
                return fused_scan.fused_scan(tokens, xs[-1], torch.float32)

            expected = with_gradients(chunks, [x.double() for x in values], weights)
            yield {
                "case": f"{length} tokens" + (" in documents" if packed else ""),
                "difference": difference(with_gradients(fused, values, weights), expected),
            }
            with torch.no_grad():  # few tokens run another kernel
                yield {
                    "case": f"{length} tokens without gradients" + (" in documents" if packed else ""),
                    "difference": difference([*fused(*values)], expected[:2]),
                }


def members(kind: str) -> Iterator[dict[str, Any]]:
    """A mechanism as decoder and encoder, with documents and padding, and its next token."""
    config = MechanismConfig.from_dict(kind)
    module = config.build(HEADS, KEY)
    for causal in (True, False):
        length, inputs = 19, [normal(BATCH, HEADS, 19, KEY) for _ in range(3)]
        width = sum(config.gate_sizes(HEADS, KEY).values())
        inputs += [normal(BATCH, length, width)] if width else []
        doc = (torch.arange(length) // 7).expand(BATCH, -1)
        valid = torch.arange(length) < torch.tensor([[19], [16]])
        context = Context(length, length, causal=causal, q_doc=doc, kv_doc=doc, kv_valid=valid)
        weights = [normal(BATCH, HEADS, length, KEY)]

        def run(*xs: Tensor, module: Any = module, context: Context = context) -> tuple[Tensor]:
            return (module(*xs[:3], context, None, None, *xs[3:])[0],)

        refusal = fused_scan.refusal
        expected = with_gradients(
            lambda *xs: run(*xs, module=module.double()), [x.double() for x in inputs], weights
        )
        fused_scan.refusal = lambda tokens: None
        actual = with_gradients(functools.partial(run, module=module.float()), inputs, weights)
        fused_scan.refusal = refusal
        yield {"case": "decoder" if causal else "encoder", "difference": difference(actual, expected)}


def forgetting() -> Iterator[dict[str, Any]]:
    """Forgetting attention of whole texts and of documents, with a key head for two query heads."""
    from polyformer.attention.mechanisms import forgetting as forgetting_module

    module: Any = MechanismConfig.from_dict("forgetting(gate_bias=1.0)").build(2 * HEADS, KEY)
    with torch.no_grad():
        module.gate_vector.copy_(normal(2 * HEADS, KEY))
    for length in (2, 9, 70):  # a single token has gradients of 0
        for packed in (False, True):
            doc = (torch.arange(length) // 7).expand(BATCH, -1) if packed else None
            context = Context(length, length, causal=True, q_doc=doc, kv_doc=doc)
            tables = [normal(BATCH, heads, length, KEY) for heads in (2 * HEADS, HEADS, HEADS)]
            weights = [normal(BATCH, 2 * HEADS, length, KEY)]

            def run(*xs: Tensor, context: Context = context) -> tuple[Tensor]:
                return (module(*xs, context, None, None)[0],)

            module.double()
            expected = with_gradients(run, [x.double() for x in tables], weights)
            module.float()
            forgetting_module.refusal, before = (lambda call: None), forgetting_module.refusal
            actual = with_gradients(run, tables, weights)
            forgetting_module.refusal = before
            yield {
                "case": f"{length} tokens" + (" in documents" if packed else ""),
                "difference": difference(actual, expected),
            }


def rank_one() -> Iterator[dict[str, Any]]:
    """The recurrence of RWKV-7 by a kernel that the library does not use, from a state."""
    from fla.ops.generalized_delta_rule import dplr

    for length in (1, 5, 37):
        keys = [normal(BATCH, HEADS, length, KEY) for _ in range(3)]
        reader = keys[2] / keys[2].norm(dim=-1, keepdim=True)
        eraser, decay = uniform(BATCH, HEADS, length, KEY) * reader, -0.6 * uniform(BATCH, HEADS, length, KEY)
        values, state = normal(BATCH, HEADS, length, VALUE), normal(BATCH, HEADS, KEY, VALUE)
        inputs = [keys[0], keys[1], values, decay, reader, eraser]
        q, k, v, g, p, e = (x.double() for x in inputs)
        expected = rank_one_scan(RankOneInputs(q, k, v, g, reader=p, eraser=e), state.double())
        q, k, v, g, p, e = (x.transpose(1, 2).contiguous() for x in inputs)
        y, after = dplr.fused_recurrent_dplr_delta_rule(
            q, k, v, -p, e, g, scale=1.0, initial_state=state, output_final_state=True
        )
        yield {
            "case": f"{length} tokens",
            "difference": difference([y.transpose(1, 2), after], list(expected)),
        }


RULES = {
    "simple_gla": (1, False),
    "gla": (KEY, False),
    "gated_delta_rule": (1, True),
    "kda": (KEY, True),
    "none": (0, False),
    "delta": (0, True),
}

if __name__ == "__main__":
    name = sys.argv[1]
    if name in ("rank_one", "forgetting"):
        reports = rank_one() if name == "rank_one" else forgetting()
    else:
        reports = scans(*RULES[name]) if name in RULES else members(name.removeprefix("member-"))
    for report in reports:
        print(json.dumps(report), flush=True)
