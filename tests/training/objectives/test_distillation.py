"""The triple loss against numbers worked by hand, and the layers that a student begins with."""

import math

import pytest
import torch

from polyformer.training.objectives import (
    DistillationConfig,
    chosen_layers,
    distillation_loss,
    hidden_loss,
    soft_loss,
)

EPS = torch.finfo(torch.float32).eps
"""Losses are computed in float32 of log-probabilities near 1, and multiplied by T^2."""


def test_soft_targets_worked_by_hand():
    """At T = 2 the teacher's logits (2 ln 3, 0) are the odds 3 : 1, the student's (0, 0) even ones:
    T^2 KL = 4 (3/4 ln(3/4 / 1/2) + 1/4 ln(1/4 / 1/2)) = 3 ln 3/2 - ln 2, half with an item that agrees."""
    teacher = torch.tensor([[2 * math.log(3), 0.0], [5.0, -1.0]])
    student = torch.tensor([[0.0, 0.0], [6.0, 0.0]])
    expected = (3 * math.log(1.5) - math.log(2)) / 2
    assert soft_loss(student, teacher, 2.0).item() == pytest.approx(expected, abs=8 * 2**2 * EPS)


def test_the_direction_is_from_the_teacher():
    """KL(teacher || student), not the other way round, which is another number."""
    teacher, student = torch.tensor([[math.log(9.0), 0.0]]), torch.tensor([[0.0, 0.0]])
    there = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    back = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert soft_loss(student, teacher, 1.0).item() == pytest.approx(there, abs=8 * EPS)
    assert abs(there - back) > 0.1


def test_the_gradient_is_as_large_at_any_temperature():
    """d/ds = T (softmax(s/T) - softmax(t/T)), for logits small beside T nearly (s - t) / classes."""
    teacher = torch.tensor([[0.1, -0.2, 0.1]], dtype=torch.float32)
    slopes = []
    for temperature in (10.0, 100.0):
        student = torch.tensor([[0.3, 0.0, -0.3]], requires_grad=True)
        soft_loss(student, teacher, temperature).backward()
        slopes.append(student.grad)
    expected = (torch.tensor([[0.3, 0.0, -0.3]]) - teacher) / 3
    for slope in slopes:
        torch.testing.assert_close(slope, expected, rtol=0, atol=4e-3)


def test_hidden_states_worked_by_hand():
    student, teacher = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[30.0, 40.0], [0.0, 7.0]])
    assert hidden_loss(student, teacher).item() == pytest.approx(0.5, abs=1e-6)


def test_the_whole_is_the_weighted_sum_and_the_teacher_gets_no_gradient():
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]
    logits, hidden = (tensors[0], tensors[1]), (tensors[2], tensors[3])
    labels_loss = torch.tensor(0.7, requires_grad=True)
    config = DistillationConfig(teacher="t", temperature=3.0, soft=0.5, hard=0.25, cosine=2.0)
    loss = distillation_loss(config, labels_loss, logits, hidden)
    parts = 0.5 * soft_loss(*logits, 3.0) + 0.25 * labels_loss + 2.0 * hidden_loss(*hidden)
    assert loss.item() == pytest.approx(parts.item(), rel=1e-6)
    loss.backward()
    assert tensors[0].grad is not None
    assert tensors[2].grad is not None
    assert tensors[1].grad is None
    assert tensors[3].grad is None


def test_no_item_is_a_loss_of_zero_with_a_place_in_the_graph():
    none = torch.zeros(0, 4, requires_grad=True)
    for loss in (soft_loss(none, torch.zeros(0, 4)), hidden_loss(none, torch.zeros(0, 4))):
        assert loss.item() == 0
        assert loss.requires_grad


@pytest.mark.parametrize(
    ("teacher", "student", "layers"),
    [
        (12, 6, [0, 2, 4, 7, 9, 11]),
        (4, 2, [0, 3]),
        (6, 3, [0, 3, 5]),
        (5, 1, [0]),
        (3, 3, [0, 1, 2]),
        (1, 1, [0]),
    ],
)
def test_layers_are_those_of_the_release(teacher: int, student: int, layers: list[int]):
    assert chosen_layers(teacher, student) == layers
