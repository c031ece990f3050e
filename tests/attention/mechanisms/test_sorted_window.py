"""Windows in the sorted order of buckets are the last m keys of a token's own bucket, counted one by one."""

import itertools

import pytest
import torch
from torch import Tensor

from attention_cases import random_context
from polyformer.attention.mechanisms.lsh.sorted_window import bucket_windows
from polyformer.core.sequence.context import Context


def counted(buckets: Tensor, size: int, context: Context) -> Tensor:
    """Who sees whom [B, H, R, T, T], from the words alone."""
    *rows, length = buckets.shape
    seen = torch.zeros(*rows, length, length, dtype=torch.bool)
    for place in itertools.product(*map(range, rows)):
        b = place[0]
        for i in range(length):
            seen[(*place, i, i)] = True
            steps = (-1,) if context.causal else (-1, 1)
            for step in steps:
                left = size - 1
                for j in range(i + step, length if step > 0 else -1, step):
                    if mine(buckets[place], context, b, i, j) and left:
                        seen[(*place, i, j)] = True
                        left -= 1
    return seen


def mine(buckets: Tensor, context: Context, b: int, i: int, j: int) -> bool:
    valid, doc = context.kv_valid, context.kv_doc
    real = valid is None or bool(valid[b, i] & valid[b, j])
    return real and bool(buckets[i] == buckets[j]) and (doc is None or bool(doc[b, i] == doc[b, j]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 3, 30])
def test_windows_are_the_last_keys_of_a_bucket(size: int, causal: bool) -> None:
    torch.manual_seed(0)
    for documents, padding in itertools.product([False, True], repeat=2):
        context = random_context(2, 23, 23, causal=causal, documents=documents, padding=padding)
        buckets = torch.randint(0, 3, (2, 2, 2, 23))
        windows = bucket_windows(buckets, size, context)
        seen = windows.sees(windows.spots.unsqueeze(-1), windows.spots.unsqueeze(-2))
        assert torch.equal(seen, counted(buckets, size, context))
        assert torch.equal(windows.order.sort(-1).values, torch.arange(23).expand_as(windows.order))
        in_order = windows.spots.gather(-1, windows.order)
        assert (in_order.diff(dim=-1) > 0).all()
