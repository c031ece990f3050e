"""Pictures of patterns: exact against masks made by hand and layouts, and figures and text of them."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyformer.attention.patterns import Causal, Documents, Full, Global, Pattern, PerHead, PerLayer, Window
from polyformer.cli.plots.pattern import (
    FULL,
    LIMIT,
    MASKED,
    SKIPPED,
    PatternPicture,
    draw_pattern,
    labels,
    pictures,
)
from polyformer.cli.plots.show_pictures import (
    ASCII,
    Characters,
    characters,
    mask_cells,
    pattern_text,
    reduced,
    work_cells,
)
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context


def only_picture(pattern: Pattern, length: int, **options) -> PatternPicture:
    (picture,) = pictures(pattern, Context(length, length), **options)
    return picture


def by_hand(length: int, window: int, first: int, causal: bool) -> Tensor:
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            mask[i, j] = (abs(i - j) <= window or min(i, j) < first) and (j <= i or not causal)
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 13, 300])
def test_the_mask_is_exact(length: int, causal: bool):
    (picture,) = pictures(Window(3) | Global(2), Context(length, length, causal=causal))
    expected = by_hand(length, 3, 2, causal)
    assert torch.equal(picture.mask, expected)
    assert picture.counts == expected.sum(1).tolist()
    assert picture.density == expected.sum().item() / length**2


@pytest.mark.parametrize("block", [1, 5, 16])
def test_the_work_is_that_of_the_layout(block: int):
    pattern, context = Window(4) | Global(1), Context(37, 37)
    (picture,) = pictures(pattern, context, block=block)
    states = torch.zeros(37, 37, dtype=torch.long)
    for row in pattern.layout(context, block):
        for i in range(row.start, row.stop):
            for j in range(37):
                some = any(a <= j < b for a, b in row.keys.some)
                full = any(a <= j < b for a, b in row.keys.full)
                states[i, j] = FULL if full else MASKED if some else SKIPPED
    assert torch.equal(picture.work.long(), states)
    assert picture.mask[picture.work == FULL].all()
    assert not picture.mask[picture.work == SKIPPED].any()


def test_heads_alike_are_one_picture():
    pattern = PerHead((Window(1), Full(), Window(1)))
    panels = pictures(pattern, Context(9, 9), heads=5)
    assert [panel.heads for panel in panels] == [(0, 2, 3), (1, 4)]
    assert labels(panels) == ["heads 0, 2, 3", "heads 1, 4"]
    assert panels[1].mask.all()
    assert torch.equal(panels[0].work, only_picture(Window(1), 9).work)
    assert labels(pictures(Window(1), Context(9, 9))) == [""]


def test_layers_are_chosen():
    pattern = PerLayer((Window(1), Causal()))
    assert torch.equal(only_picture(pattern, 9, layers=(1,)).mask, torch.ones(9, 9).tril().bool())
    assert labels(pictures(pattern, Context(9, 9), layers=(0, 1))) == ["layer 0", "layer 1"]


def test_what_the_context_forbids_counts():
    numbers = torch.tensor([[0, 0, 0, 1, 1]])
    (picture,) = pictures(Full(), Context(5, 5, q_doc=numbers, kv_doc=numbers))
    assert picture.counts == [3, 3, 3, 2, 2]
    (alone,) = pictures(Documents(), Context(5, 5, q_doc=numbers, kv_doc=numbers))
    assert torch.equal(picture.mask, alone.mask)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (0, {}, "length: expected 1 to 4096, got 0"),
        (LIMIT + 1, {}, "length: expected 1 to 4096, got 4097"),
        (4, {"block": 0}, "block: expected 1 or more, got 0"),
        (4, {"heads": 0}, "heads: expected 1 to 64, got 0"),
        (4, {"layers": (-1,)}, "layer: layers count from 0, got -1"),
    ],
)
def test_sizes_of_pictures_out_of_range_are_refused(length: int, options: dict, message: str):
    with pytest.raises(InputError, match=message):
        pictures(Full(), Context(length, length), **options)


def test_text_of_a_small_pattern():
    text = pattern_text([only_picture(Window(1) | Global(1), 6, block=3)], 60)
    assert text.split("\n") == [
        "(Window(before=1, after=1, dilation=1) | Global(tokens=1))",
        "Keys per query: 3-6, 4 on average. Density 66.7 %. The",
        "layout computes 80.6 % of all scores, 50 % without a mask.",
        "",
        "mask (one character: 2 queries x 1 keys; right: keys per",
        "query)",
        "0 ███▀▀▀ 3-6",
        "2 █▀██▄  4",
        "4 █  ▀██ 3-4",
        "",
        "layout (█ computed in full, ▒ with a mask, · skipped)",
        "0 ███▒▒▒ 3-6",
        "2 █▒▒▒▒▒ 4",
        "4 █·▒▒█▒ 3-4",
    ]


@pytest.mark.parametrize("width", [1, 5, 17, 40, 79])
@pytest.mark.parametrize("signs", [ASCII, Characters()])
def test_text_is_never_wider_than_the_terminal(width: int, signs: Characters):
    panels = pictures(PerHead((Window(9), Window(2, dilation=3) | Global(2))), Context(101, 101))
    lines = pattern_text(panels, width, signs).split("\n")
    assert max(map(len, lines)) <= width
    assert width < 40 or max(map(len, lines)) > width - 6  # it uses the room there is


def test_scaled_down_shades_say_how_many():
    mask = torch.zeros(8, 6, dtype=torch.bool)
    mask[:4, :2] = True
    mask[0, 2] = True
    mask[4:, 4:] = True
    mask[7, 5] = False
    assert mask_cells(mask, 2, ASCII) == ["#. ", "  *"]


def test_cells_at_the_edges_are_means_of_what_is_there():
    assert reduced(torch.ones(7, 5), 2).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_work_of_several_kinds_in_one_cell_is_partly_masked():
    work = torch.tensor([[FULL, SKIPPED, MASKED, FULL], [FULL, SKIPPED, MASKED, SKIPPED]]).byte()
    assert work_cells(work, 1, ASCII) == ["#.++"]


def test_terminals_without_blocks_get_ascii():
    assert characters("utf-8") == Characters()
    for encoding in ("ascii", "latin-1", None, "no such"):
        assert characters(encoding) == ASCII


def test_figures_are_written_and_readable(tmp_path: Path):
    image = pytest.importorskip("matplotlib.image")
    panels = pictures(Window(2), Context(700, 700), heads=2)
    draw_pattern(panels, tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")
    assert pixels.ndim == 3
    assert pixels[..., :3].min() < 0.5 < pixels[..., :3].max()
    draw_pattern(panels, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert sorted(os.listdir(tmp_path)) == ["a.png", "a.svg"]
