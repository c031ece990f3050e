"""Mixing rates by their equation, and which examples an epoch has."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch

from polyformer.core.errors import InputError
from polyformer.data import Collate, by_rows
from polyformer.data.rows import Mixture, draw_order, mixing_rates, share_of_epoch


def test_rates_are_those_of_the_equation():
    sizes, limit = [10, 1000, 300], 500
    counted = [10, 500, 300]
    assert mixing_rates(sizes, limit) == pytest.approx([size / 810 for size in counted])
    assert mixing_rates(sizes) == pytest.approx([size / 1310 for size in sizes])
    for temperature in (0.5, 2.0, 8.0):
        powers = [(size / 810) ** (1 / temperature) for size in counted]
        expected = [power / sum(powers) for power in powers]
        assert mixing_rates(sizes, limit, temperature) == pytest.approx(expected)
    assert mixing_rates(sizes, None, 1e9) == pytest.approx([1 / 3] * 3)
    assert mixing_rates(sizes, 1) == pytest.approx([1 / 3] * 3)


def test_temperatures_limits_and_sizes_of_zero_are_refused():
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="temperature: expected a number above 0"):
            mixing_rates([1], None, bad)
    with pytest.raises(InputError, match="limit: expected 1 example or more, got 0"):
        mixing_rates([1], 0)
    with pytest.raises(
        InputError, match=r"sizes: expected an example or more of each data set, got \[3, 0\]"
    ):
        mixing_rates([3, 0])


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.77])
def test_epochs_follow_one_another_without_a_gap(rate: float):
    shares = [share_of_epoch(rate, 7, epoch) for epoch in range(30)]
    assert [place for share in shares for place in share] == list(range(shares[-1].stop))
    assert shares[-1].stop == round(rate * 7 * 30)
    assert {len(share) for share in shares} <= {int(rate * 7), int(rate * 7) + 1}


def test_every_example_is_read_once_before_any_is_read_again():
    examples = [example for start in (0, 3, 8) for example in draw_order(5, range(start, start + 5), 1, 0)]
    assert draw_order(5, range(10), 1, 0) == [
        *examples[:3],
        *examples[5:10],
        *draw_order(5, range(8, 10), 1, 0),
    ]
    assert (
        sorted(draw_order(5, range(5), 1, 0)) == sorted(draw_order(5, range(5, 10), 1, 0)) == list(range(5))
    )
    orders = [draw_order(9, range(9), seed, number) for seed, number in ((1, 0), (1, 1), (2, 0))]
    assert len({*map(tuple, orders)}) == 3


def mixture(seed: int = 3) -> Mixture:
    parts = [[{"input_ids": [part, i]} for i in range(size)] for part, size in enumerate((4, 40))]
    plan = partial(by_rows, batch_size=3)
    return Mixture(parts, mixing_rates([4, 40], 12), 16, plan, Collate(0), seed)


def test_an_epoch_has_the_rates_and_goes_on_where_it_stopped():
    mixed = mixture()
    for epoch in range(3):
        batches = list(mixed.epoch(epoch))
        rows = [tuple(row) for _, batch in batches for row in batch["input_ids"].tolist()]
        assert Counter(part for part, _ in rows) == {0: 4, 1: 12}
        for (position, _), following in itertools.pairwise(batches):
            _, again = next(iter(mixture().epoch(epoch, position=position)))
            assert torch.equal(again["input_ids"], following[1]["input_ids"])
    seen = {row["input_ids"][1] for epoch in range(3) for row in mixed.rows(epoch) if row["input_ids"][0]}
    assert len(seen) == 36
    assert mixture(4).rows(0) != mixed.rows(0)
