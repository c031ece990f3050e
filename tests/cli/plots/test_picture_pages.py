"""The pages of pictures: small, the same at every build, exact, and detected when stale."""

import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer import InputError
from polyformer.attention.patterns import Full, Global, Pattern, PerHead, Window
from polyformer.attention.positions import AlibiConfig, PositionConfig, SinusoidalConfig
from polyformer.cli import documentation
from polyformer.cli.plots import svg as module
from polyformer.cli.plots.pattern import MASKED, SKIPPED, pictures
from polyformer.cli.plots.position import position_picture, position_svg
from polyformer.cli.plots.svg import DARK, LIGHT, SEEN, pages, pattern_svg, runs
from polyformer.core.registry import in_package
from polyformer.core.sequence.context import Context


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return pages()


def cells(svg: str, colour: str, rows: int, columns: int) -> list[Tensor]:
    """The cells painted in a colour, for each path of it."""
    painted = []
    for data in re.findall(f'stroke="{colour}" transform="[^"]*" d="([^"]*)"', svg):
        flags = torch.zeros(rows, columns, dtype=torch.bool)
        for x, y, way, length in re.findall(r"M(\d+) (\d+)([hv])(\d+)", data):
            x, y, length = int(x), int(y), int(length)
            area = (slice(y, y + 1), slice(x, x + length)) if way == "h" else (slice(y, y + length), x)
            assert not flags[area].any()
            flags[area] = True
        painted.append(flags)
    return painted


@pytest.mark.parametrize(
    "pattern", [Window(3) | Global(2), Window(2, dilation=4), PerHead((Full(), Window(1)))]
)
def test_a_picture_holds_its_pattern(pattern: Pattern):
    panels = pictures(pattern, Context(21, 21), block=4)
    svg = pattern_svg(panels)
    seen, computed = [panel.mask for panel in panels], [panel.work != SKIPPED for panel in panels]
    masked = [panel.work == MASKED for panel in panels]
    wanted = {
        DARK: [a & ~b for a, b in zip(seen, masked)],
        SEEN: [a & b for a, b in zip(seen, masked)],
        LIGHT: [a & ~b for a, b in zip(computed, seen)],
    }
    for colour, flags in wanted.items():
        drawn = cells(svg, colour, 21, 21)
        expected = [panel for panel in flags if panel.any()]
        assert len(drawn) == len(expected)
        assert all(map(torch.equal, drawn, expected))


def test_runs_of_rows():
    flags = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert runs(flags) == [(0, 0, 2), (3, 0, 1), (0, 2, 4)]


def points(svg: str, color: str) -> np.ndarray:
    """The corners [N, 2] of the line of this colour in matplotlib's SVG; the legend's is the other."""
    style = f'style="fill: none; stroke: {color};[^"]*linecap: square"/>'
    data, _ = re.findall(rf'<path d="([^"]*)"[^>]*{style}', svg)
    return np.array(re.findall(r"[ML] (\S+) (\S+)", data), float)


def test_lines_over_distance_are_the_scores():
    picture = position_picture(AlibiConfig(), 5, heads=2)
    svg = position_svg(picture)
    curves = picture.by_distance
    assert curves is not None
    lines = [points(svg, color) for color in ("#1f77b4", "#ff7f0e")]
    heights = np.concatenate([line[:, 1] for line in lines])
    for line, curve in zip(lines, curves.numpy()):
        x, y = line.T
        shown = (heights.min() - y) / np.ptp(heights) * -float(curves.min())  # the top of a picture is y = 0
        at = np.interp(x, [x.min(), x.max()], [-4, 4])
        np.testing.assert_allclose(shown, np.interp(at, np.arange(-4, 5), curve), atol=1e-5)


def test_a_picture_has_axes_units_and_a_legend():
    lines = {
        AlibiConfig(): [
            "how far the key lies before the query (tokens)",
            "added to the score (logits)",
            "head 1",
        ],
        SinusoidalConfig(): ["position (tokens)", "added to the input", "feature 16", "0.50"],
    }
    for config, words in lines.items():
        svg = position_svg(position_picture(config, 9, heads=4))
        assert all(f">{word}</text>" in svg for word in words), config
        assert "<image" not in svg


def test_every_member_has_a_section_and_a_small_picture(files: dict[str, str]):
    for name, pattern in Pattern.registry.items():
        assert (f"\n## {name}\n" in files["patterns.md"]) == in_package(pattern)
        assert (f"patterns/{name}.svg" in files) == in_package(pattern)
    for kind in PositionConfig.kinds:
        assert f"\n## {kind}\n" in files["positions.md"]
    shown = re.findall(r"!\[\w+\]\((.*)\)", files["patterns.md"] + files["positions.md"])
    assert sorted(shown) == sorted(path for path in files if path.endswith(".svg") and "/" in path)
    assert max(len(text) for path, text in files.items() if path.endswith(".svg")) < 20_000


def test_the_same_at_every_build(files: dict[str, str]):
    torch.manual_seed(5)
    assert pages() == files


def test_positions_need_matplotlib_and_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="drawing needs matplotlib, which is not installed; pip install"):
        position_svg(position_picture(AlibiConfig(), 5))


@pytest.fixture
def copy(tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a page of its own and the pages of pictures, none of them written yet."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "SECURITY.md"):
        (tmp_path / name).write_text("no tables\n")
    (tmp_path / "docs" / "design.md").write_text("by hand\n")
    monkeypatch.setattr(module, "pages", lambda: files)
    monkeypatch.setattr(documentation, "ROOT", tmp_path)
    monkeypatch.setattr(documentation, "DOCS", tmp_path / "docs")
    return tmp_path / "docs"


def test_missing_stale_and_left_over_pictures_are_found(copy: Path, capsys: pytest.CaptureFixture[str]):
    def check() -> list[str]:
        status = documentation.main(["--check"])
        lines = capsys.readouterr().out.split("\n")[:-1]
        assert status == bool(lines)
        return lines

    assert "docs/patterns.md: stale; run `make docs`" in check()
    assert documentation.main([]) == 0
    capsys.readouterr()
    assert check() == []
    (copy / "patterns" / "Window.svg").write_text("old")
    (copy / "positions" / "alibi.svg").unlink()
    (copy / "patterns" / "Gone.svg").write_text("<svg/>")
    assert check() == [
        "docs/patterns/Window.svg: stale; run `make docs`",
        "docs/positions/alibi.svg: stale; run `make docs`",
        "docs/patterns/Gone.svg: no longer used; run `make docs`",
    ]
    assert documentation.main([]) == 0
    assert not (copy / "patterns" / "Gone.svg").exists()
    assert (copy / "design.md").read_text() == "by hand\n"
    capsys.readouterr()
    assert check() == []


def test_pictures_of_patterns_differ(files: dict[str, str]):
    """Each shows its own idea: not two are alike, but those of the same two patterns by head and by layer."""
    same = [
        {first, second}
        for first, second in itertools.combinations(sorted(path for path in files if "patterns/" in path), 2)
        if files[first] == files[second]
    ]
    assert same in ([], [{"patterns/PerHead.svg", "patterns/PerLayer.svg"}])
