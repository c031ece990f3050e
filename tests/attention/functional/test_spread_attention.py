"""A sequence spread over processes: `attend` and its gradients are those of one. Real processes, gloo."""

import pytest
import torch
from spread_cases import HEADS, LENGTH, check_pattern, random_inputs, share_of, whole_context
from torch import Tensor

from launching import launch, run_checks
from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.key_exchange import counted_transfers, find_needs, imbalance
from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns import Causal, Global, Pattern, PerHead, Strided, Window
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context, SequenceShard, balanced, contiguous
from polyformer.core.sequence.context_parallel import shard_sequence
from registered import EVERYTHING, registered

WAYS = "all", "needed", "ring"


def all_patterns() -> None:
    """Every registered pattern, and none, with and without a future; half with documents and padding."""
    number_of_each = None if EVERYTHING else 1
    kinds = registered(Pattern.registry)
    examples = (None, *(example for cls in kinds for example in cls.examples()[:number_of_each]))
    for number, pattern in enumerate(examples):
        for causal in (False, True):
            if causal and pattern is not None and not pattern.causal():
                continue
            torch.manual_seed(number)
            whole = whole_context(LENGTH, causal=causal, mixed=(number + causal) % 2 == 1)
            check_pattern(pattern, share_of("balanced" if causal else "contiguous", LENGTH, "auto"), whole)
    assert number == len(examples) - 1 >= len(kinds)


def terms_of_scores() -> None:
    """Tables by distance, score_mods and mask_mods of slots, in every way, for shares of both kinds."""
    torch.manual_seed(1)
    table = torch.randn(HEADS, 2 * LENGTH + 1, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(HEADS, 2 * LENGTH + 1, 6, dtype=torch.float64, requires_grad=True)
    relative = Relative(
        first=-LENGTH,
        bias=table,
        position_keys=vectors,
        position_queries=vectors.flip(0),
        position_values=vectors[..., :5],
    )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx - kv_idx + LENGTH] - 0.01 * q_idx

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx * 3 + kv_idx) % 5 != h

    heads = PerHead((Window(5, 2), Strided(7), Global(2), Causal()))
    for way in WAYS:
        for kind in ("contiguous", "balanced"):
            for options in (
                {"relative": relative, "pattern": Window(9, 3) | Global(1)},
                {"relative": relative, "pattern": heads},
                {"score_mod": score_mod, "mask_mod": mask_mod},
                {"pattern": Window(9, 3, 2), "score_mod": score_mod, "backend": "definition"},
                {"mask_mod": mask_mod, "relative": relative},
            ):
                if way == "ring" and "score_mod" in options:
                    continue
                whole = whole_context(LENGTH, causal=kind == "balanced", mixed=True)
                share, parameters = share_of(kind, LENGTH, way), (table, vectors)
                check_pattern(options.pop("pattern", None), share, whole, parameters, **options)


def few_tokens() -> None:
    """Processes without a token, and one whose queries need nobody's keys, take part as well."""
    for length in (1, 3, 5):
        for way in WAYS:
            share, whole = share_of("balanced", length, way), Context(length, length, causal=True)
            check_pattern(Window(2, 0), share, whole)
    check_pattern(Window(1, 0), share_of("contiguous", 8, "auto"), Context(8, 8))


def bytes_are_those_of_the_layout() -> None:
    """A window brings the keys before and after a process's queries and nothing else."""
    share, whole = share_of("contiguous", 4000, "auto"), Context(4000, 4000)
    q, k, v = (share.take(x, 2).float().requires_grad_() for x in random_inputs(4000))
    context, pattern = shard_sequence(whole, share, q.device), Window(20, 10)
    first, last = share.local_runs[0]
    needed = min(20, first) + min(10, 4000 - last)
    expected = needed * k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3]) * 4
    assert explain(q, k, v, pattern=pattern, context=context).bytes_received == expected
    with counted_transfers() as transfers:
        attend(q, k, v, pattern=pattern, context=context).sum().backward()
    forward, backward = transfers
    assert forward.received == expected == backward.sent


def a_ring_holds_few_keys() -> None:
    """Chosen where all keys are needed: a process receives those of the others one by one, and gradients."""
    share, whole = share_of("balanced", 400, "auto"), Context(400, 400, causal=True)
    q, k, v = (share.take(x, 2).float().requires_grad_() for x in random_inputs(400))
    context = shard_sequence(whole, share, q.device)
    plan = explain(q, k, v, context=context)
    assert "spread over 4 processes: ring" in str(plan)
    with counted_transfers() as transfers:
        attend(q, k, v, context=context).sum().backward()
    chunk = k.nbytes + v.nbytes
    assert [transfer.received for transfer in transfers] == [chunk] * (3 + 3 + 4)
    assert plan.bytes_received == 3 * chunk
    dropped = explain(q, k, v, context=context, dropout=0.1)
    assert "needed (a ring recomputes its parts, and dropout would draw other numbers)" in str(dropped)


def half_precision() -> None:
    """Under autocast parts are computed in bfloat16 and joined in float32, which stays near one process."""
    whole, pattern = Context(LENGTH, LENGTH, causal=True), Window(9, 0) | Global(1)
    q, k, v = (x.float() for x in random_inputs(LENGTH))
    for way in ("needed", "ring"):
        share = share_of("balanced", LENGTH, way)
        local = [share.take(x, 2).requires_grad_() for x in (q, k, v)]
        context = shard_sequence(whole, share, q.device)
        expected = share.take(attend(q, k, v, pattern=pattern, context=whole), 2)
        exact = attend(*local, pattern=pattern, context=context)
        torch.testing.assert_close(exact, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = attend(*local, pattern=pattern, context=context)
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), expected, rtol=0.05, atol=0.05)
        slopes = [torch.autograd.grad(out.square().sum(), local) for out in (rounded.float(), exact)]
        for actual, slope in zip(*slopes):
            torch.testing.assert_close(actual, slope, rtol=0.1, atol=0.1)


CHECKS = {
    2: (all_patterns, terms_of_scores, few_tokens, bytes_are_those_of_the_layout, half_precision),
    4: (terms_of_scores, few_tokens, bytes_are_those_of_the_layout, a_ring_holds_few_keys),
}


def test_processes_compute_what_one_does():
    launch(__file__)


def test_shares_hold_every_slot_once():
    for length in (0, 1, 7, 45):
        for processes in (1, 2, 3, 4):
            for runs in (contiguous(length, processes), balanced(length, processes)):
                slots = [slot for own in runs for start, stop in own for slot in range(start, stop)]
                assert sorted(slots) == list(range(length))


def test_a_causal_pattern_is_balanced():
    whole = Context(4096, 4096, causal=True)
    pairs = [
        sum(stop * (stop + 1) // 2 - start * (start + 1) // 2 for start, stop in own)
        for own in balanced(4096, 4)
    ]
    assert max(pairs) <= 1.001 * min(pairs)
    assert imbalance(Causal(), whole, 4) > 1.5
    assert imbalance(Window(100, 0) | Global(2), whole, 4) < 1.1
    assert imbalance(None, Context(3, 3), 4) == pytest.approx(4 / 3)
    needs = find_needs(Causal(), whole, SequenceShard(None, 0, balanced(4096, 4)))
    assert needs.keys[0] == ((0, 4096),)


def test_explain_says_what_comes_from_others():
    whole = Context(4096, 4096, causal=True)
    share = SequenceShard(None, 1, contiguous(4096, 4))
    q = torch.zeros(1, 2, 1024, 4)
    context = shard_sequence(whole, share, q.device)
    plan = explain(q, q, q, pattern=Window(100, 0) | Global(1), context=context)
    assert "101 keys from others, 6464 bytes" in str(plan)


def test_a_ring_that_cannot_be_is_refused_in_every_process():
    context = shard_sequence(
        Context(4, 4), SequenceShard(None, 0, contiguous(4, 2), "ring"), torch.device("cpu")
    )
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(InputError, match="strategy: 'ring' cannot run this call: a ring recomputes"):
        attend(q, q, q, context=context, dropout=0.5)


def test_weights_are_not_recorded():
    context = shard_sequence(Context(4, 4), SequenceShard(None, 0, contiguous(4, 2)), torch.device("cpu"))
    q = torch.zeros(1, 1, 2, 4)
    with recorded(), pytest.raises(InputError, match="spread over processes"):
        attend(q, q, q, context=context)


if __name__ == "__main__":
    run_checks(CHECKS)
