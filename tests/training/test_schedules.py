"""Schedules against their equations."""

import math
from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from polyformer.training.optimizers import Constant, Cosine, InverseSquareRoot, Linear, Noam, ScheduleConfig


def test_noam_is_the_papers_equation() -> None:
    schedule = Noam(hidden_size=512, warmup=4000)
    for step in (1, 2, 3999, 4000, 4001, 100_000):
        assert schedule.factor(step, 100_000) == 512**-0.5 * min(step**-0.5, step * 4000**-1.5)


def test_inverse_square_root_is_the_papers_over_its_peak() -> None:
    ours, paper = InverseSquareRoot(warmup=40), Noam(hidden_size=64, warmup=40)
    peak = paper.factor(40, 0)
    for step in range(1, 300):
        assert ours.factor(step, 300) == pytest.approx(paper.factor(step, 300) / peak, rel=1e-12)
    assert max(ours.factor(step, 300) for step in range(1, 300)) == ours.factor(40, 300) == 1.0


@pytest.mark.parametrize("schedule", [Linear(warmup=10, floor=0.2), Cosine(warmup=10, floor=0.2)])
def test_decaying_schedules_rise_to_one_and_end_at_the_floor(schedule: Linear | Cosine) -> None:
    factors = [schedule.factor(step, 110) for step in range(1, 111)]
    assert factors[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(later < earlier for earlier, later in pairwise(factors[9:]))
    assert factors[-1] == pytest.approx(0.2)
    assert factors[59] == pytest.approx(0.6)  # half way down, both of them
    assert schedule.factor(200, 110) == pytest.approx(0.2)


def test_a_quarter_of_the_way_tells_cosine_from_linear() -> None:
    assert Linear(warmup=0).factor(25, 100) == pytest.approx(0.75)
    assert Cosine(floor=0.0).factor(25, 100) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))


def test_constant_with_and_without_warmup() -> None:
    assert [Constant().factor(step, 5) for step in (1, 2, 5)] == [1.0, 1.0, 1.0]
    assert [Constant(warmup=4).factor(step, 5) for step in (1, 2, 4, 5)] == [0.25, 0.5, 1.0, 1.0]


def test_warmup_longer_than_the_run_only_rises() -> None:
    for schedule in (Linear(warmup=50), Cosine(warmup=50), Constant(warmup=50)):
        assert [schedule.factor(step, 20) for step in (1, 20)] == [1 / 50, 20 / 50]
        assert schedule.factor(50, 20) >= 0


@pytest.mark.parametrize("kind", sorted(ScheduleConfig.kinds))
def test_as_a_torch_scheduler(kind: str) -> None:
    schedule = ScheduleConfig.kinds[kind].examples()[0]
    assert isinstance(schedule, ScheduleConfig)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = LambdaLR(optimizer, lambda done: schedule.factor(done + 1, 7))
    for step in range(1, 8):
        assert optimizer.param_groups[0]["lr"] == 0.5 * schedule.factor(step, 7)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", sorted(ScheduleConfig.kinds))
def test_files_and_back(kind: str) -> None:
    for schedule in ScheduleConfig.kinds[kind].examples():
        assert ScheduleConfig.from_json(schedule.to_json()) == schedule
        assert ScheduleConfig.from_yaml(schedule.to_yaml()) == schedule
