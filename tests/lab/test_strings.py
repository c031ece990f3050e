"""Generated strings and lists beside Python's own arithmetic."""

import random
import re

import pytest
import torch

from polyformer_lab.listops import CLOSE, DIGIT, OPERATOR, OPERATORS, ListOps
from polyformer_lab.string_tasks import DIGIT as FIRST
from polyformer_lab.string_tasks import END, PLUS, STRINGS


@pytest.mark.parametrize("task", STRINGS)
def test_targets_are_what_the_task_says(task: str):
    sources, targets = STRINGS[task](50, 6, torch.Generator().manual_seed(0))
    for source, target in zip(sources.tolist(), targets.tolist()):
        assert source.pop() == target.pop() == END
        if task == "add":
            plus = source.index(PLUS)
            a, b, total = (
                sum((digit - FIRST) * 10**place for place, digit in enumerate(digits))
                for digits in (source[:plus], source[plus + 1 :], target)
            )
            assert a + b == total
        else:
            assert target == (source if task == "copy" else source[::-1])


def test_strings_are_a_function_of_the_seed():
    pairs = [STRINGS["copy"](3, 9, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert pairs[0].equal(pairs[1])
    assert not pairs[0].equal(pairs[2])


def evaluated(ids: list[int], depths: list[int]) -> dict[int, tuple[int, int]]:
    """By place of a closing bracket its value and depth, with a stack."""
    result, open_lists = {}, []
    for place, token in enumerate(ids):
        if token >= OPERATOR:
            open_lists.append((list(OPERATORS)[token - OPERATOR], [], []))
        elif token == CLOSE:
            name, values, inner = open_lists.pop()
            result[place] = OPERATORS[name](values), 1 + max(inner, default=0)
            if open_lists:
                open_lists[-1][1].append(result[place][0])
                open_lists[-1][2].append(result[place][1])
        else:
            open_lists[-1][1].append(token - DIGIT)
    assert not open_lists
    return result


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_bracket_has_the_value_and_depth_of_its_list(depth: int):
    draw = random.Random(depth)
    for _ in range(30):
        text = ListOps(most=4, chance=0.5).expression(depth, draw)
        closed = evaluated(text.ids, text.depths)
        for place in range(len(text.ids)):
            assert (text.values[place], text.depths[place]) == closed.get(place, (-100, 0))
        assert closed[len(text.ids) - 1][1] == depth


def test_no_list_stands_right_inside_one_of_its_operator():
    draw = random.Random(0)
    for _ in range(20):
        ids = ListOps(operators=("MIN", "MAX"), most=2).expression(3, draw).ids
        text = "".join(
            "[mX"[2 if i == OPERATOR else 1] if i >= OPERATOR else "]" if i == CLOSE else "." for i in ids
        )
        assert not re.search(r"mm|XX", text)


def test_the_operators_are_long_range_arenas():
    values = [4, 9, 2, 8]
    assert {name: operator(values) for name, operator in OPERATORS.items()} == {
        "MIN": 2,
        "MAX": 9,
        "MED": 6,
        "SM": 3,
    }
