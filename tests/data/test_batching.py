"""The order of batches is a function of (seed, epoch); every row is served once; runs resume anywhere."""

import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyformer.core.errors import InputError
from polyformer.data.rows import (
    Batches,
    Collate,
    Position,
    Stream,
    by_rows,
    by_tokens,
    padding_share,
    row_lengths,
)

PLANS = {"rows": partial(by_rows, batch_size=4), "tokens": partial(by_tokens, max_tokens=40)}


def make_rows(count, seed=0):
    """Pairs of sequences of 1 to 20 tokens; the first token names the row."""
    lengths = np.random.default_rng(seed).integers(1, 21, (count, 2))
    return [{"input_ids": np.full(a, i), "labels": np.full(b, i)} for i, (a, b) in enumerate(lengths)]


def make_batches(count=37, plan="rows", **options):
    return Batches(make_rows(count), PLANS[plan], Collate(pad_id=0), **options)


def names(batch):
    return [] if not batch else batch["input_ids"][:, 0].tolist()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("plan", PLANS)
def test_every_row_is_served_once_and_the_order_is_of_seed_and_epoch(plan):
    def order(seed, epoch):
        return [names(batch) for _, batch in make_batches(plan=plan, seed=seed).epoch(epoch)]

    first = order(1, 0)
    assert sorted(itertools.chain(*first)) == list(range(37))
    assert first == order(1, 0)
    assert first != order(1, 1)
    assert first != order(2, 0)


def test_without_shuffle_rows_come_in_order():
    served = [names(batch) for _, batch in make_batches(shuffle=False).epoch(3)]
    assert list(itertools.chain(*served)) == list(range(37))


@pytest.mark.parametrize("plan", PLANS)
def test_a_position_resumes_exactly(plan):
    batches = make_batches(plan=plan, seed=5)
    whole = list(batches.epoch(2))
    for done, (position, _) in enumerate(whole, 1):
        rest = list(make_batches(plan=plan, seed=5).epoch(2, position=list(position)))
        assert len(rest) == len(whole) - done
        assert all(p == q and same(a, b) for (p, a), (q, b) in zip(rest, whole[done:]))


def test_resuming_touches_no_row_that_was_done():
    class Watched(list):
        def __getitem__(self, index):
            touched.append(index)
            return super().__getitem__(index)

    touched: list[int] = []
    batches = Batches(Watched(make_rows(40)), PLANS["rows"], Collate(0), seed=1)
    order = batches.order(0)
    touched.clear()
    list(batches.epoch(0, position=(0, 8)))
    assert sorted(touched) == sorted(np.concatenate(order[8:]).tolist())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_the_union_over_ranks_is_the_global_batch(plan, world):
    batches = make_batches(plan=plan, seed=3)
    ranks = [[names(batch) for _, batch in batches.epoch(0, rank=rank, world=world)] for rank in range(world)]
    for chosen, *shares in zip(batches.order(0), *ranks):
        assert sorted(itertools.chain(*shares)) == sorted(chosen.tolist())
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_without_rows_gets_an_empty_batch():
    batches = Batches(make_rows(5), PLANS["rows"], Collate(0), shuffle=False)
    (_, first), (_, last) = batches.epoch(0, rank=1, world=2)
    assert names(first) == [1, 3]
    assert last == {}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60),
    st.integers(30, 90),
    st.booleans(),
)
def test_token_batches_hold_every_row_and_no_more_tokens_than_allowed(pairs, limit, shuffle):
    lengths = np.array(pairs, np.int64).reshape(-1, 2)
    batches = by_tokens(lengths, np.random.default_rng(0) if shuffle else None, max_tokens=limit)
    assert sorted(itertools.chain(*(batch.tolist() for batch in batches))) == list(range(len(pairs)))
    for batch in batches:
        assert len(batch) * lengths[batch].max(initial=0) <= limit


def test_token_batches_pad_far_less_than_batches_of_rows():
    """The sides of these pairs have nothing to do with each other, so some padding must remain."""
    lengths = row_lengths(make_rows(2000))
    generator = np.random.default_rng(0)
    bucketed = padding_share(lengths, by_tokens(lengths, generator, max_tokens=400))
    assert bucketed < 0.4 * padding_share(lengths, by_rows(lengths, generator, batch_size=32))
    one_side = lengths[:, :1]
    assert padding_share(one_side, by_tokens(one_side, generator, max_tokens=400)) < 0.03


def test_padding_share_by_hand():
    lengths = np.array([[3, 1], [1, 2], [4, 4]])
    # cells 2 * (3 + 2) + 1 * (4 + 4) = 18, tokens 4 + 3 + 8 = 15
    assert padding_share(lengths, [np.array([0, 1]), np.array([2])]) == pytest.approx(1 - 15 / 18)
    assert padding_share(lengths, []) == 0


def test_plans_of_no_rows_or_longer_rows_are_refused():
    with pytest.raises(InputError, match="batch_size: expected at least 1 row, got 0"):
        by_rows(np.ones((3, 1)), None, batch_size=0)
    with pytest.raises(InputError, match="max_tokens: row 1 has 9 tokens, more than a batch of 8: raise"):
        by_tokens(np.array([[3], [9]]), None, max_tokens=8)


def test_collate_pads_each_key_its_own_way():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [8], "token_type_ids": [0, 1, 1], "start_positions": 2},
        {"input_ids": [5], "labels": [8, 9], "token_type_ids": [1], "start_positions": 0},
    ]
    batch = Collate(pad_id=3, multiple=4)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 3], [5, 3, 3, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[8, -100, -100, -100], [8, 9, -100, -100]]
    assert batch["token_type_ids"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["start_positions"].tolist() == [2, 0]
    assert all(tensor.dtype == torch.long for tensor in batch.values())


def test_collate_keeps_packed_rows_and_real_targets():
    batch = Collate(pad_id=0, multiple=4)([{"input_ids": [5, 6], "document_ids": [0, 1], "labels": 0.5}])
    assert batch["document_ids"].tolist() == [[0, 1, 2, 2]]
    assert "attention_mask" not in batch
    assert batch["labels"].tolist() == [0.5]


def test_corruption_depends_on_seed_epoch_and_row_alone():
    def corrupt(row, generator):
        return {**row, "noise": int(generator.integers(2**40))}

    def noise(epoch, plan="rows", world=1, **options):
        batches = make_batches(plan=plan, corrupt=corrupt, **options)
        served = [b for rank in range(world) for _, b in batches.epoch(epoch, rank=rank, world=world) if b]
        return {name: n for b in served for name, n in zip(names(b), b["noise"].tolist())}

    first = noise(0)
    assert len(set(first.values())) == 37
    assert first == noise(0, plan="tokens") == noise(0, world=3)
    assert not set(first.values()) & set(noise(1).values())
    assert not set(first.values()) & set(noise(0, seed=1).values())
    assert noise(0, shuffle=False) == noise(1, shuffle=False), (
        "evaluation sees the same corruption every time"
    )


def prepare(raw):
    return [{"input_ids": np.full(len(row["text"]), row["number"])} for row in raw]


def make_stream(count=53, plan="rows", **options):
    source = [{"text": "x" * (1 + i % 7), "number": i} for i in range(count)]
    return Stream(source, prepare, PLANS[plan], Collate(0), seed=4, buffer=60, **options)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_stream_serves_every_row_once_and_resumes_exactly(plan, world):
    def epoch(number, position=(0, 0)):
        ranks = [
            make_stream(plan=plan).epoch(number, position=position, rank=r, world=world) for r in range(world)
        ]
        return [(parts[0][0], [names(batch) for _, batch in parts]) for parts in zip(*ranks)]

    whole = epoch(1)
    served = [name for _, batches in whole for batch in batches for name in batch]
    assert sorted(served) == list(range(53))
    assert served != sorted(served)
    assert epoch(2) != whole
    assert len({position.start for position, _ in whole}) > 2, "several blocks, or this test shows nothing"
    for done, (position, _) in enumerate(whole, 1):
        assert epoch(1, position) == whole[done:]


def test_a_resumed_stream_prepares_no_block_that_was_done():
    prepared = []

    def watched(raw):
        prepared.extend(row["number"] for row in raw)
        return prepare(raw)

    positions = [position for position, _ in make_stream().epoch(0)]
    middle = positions[len(positions) // 2]
    source = [{"text": "x" * (1 + i % 7), "number": i} for i in range(53)]
    list(Stream(source, watched, PLANS["rows"], Collate(0), seed=4, buffer=60).epoch(0, position=middle))
    assert prepared == list(range(middle.start, 53))


def test_a_stream_reads_no_further_than_it_must():
    def endless():
        return ({"text": "xxxxx", "number": i} for i in itertools.count())

    stream = Stream(endless(), prepare, PLANS["rows"], Collate(0), buffer=60)
    position, batch = next(stream.epoch(0))
    assert position == Position(0, 1)
    assert set(names(batch)) <= set(range(12))


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_no_global_random_state_is_read_or_set(state):
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    served = [names(batch) for _, batch in make_batches(seed=9).epoch(0)]
    assert served == [names(batch) for _, batch in make_batches(seed=9).epoch(0)]
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
