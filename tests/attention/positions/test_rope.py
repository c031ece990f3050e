"""RoPE: angles, layouts, fractions, extensions; what it shares between layers and keeps exact far away."""

import dataclasses
import math

import pytest
import torch
from naive import SITE
from naive_schemes import NaiveRope
from torch import Tensor

from polyformer.attention.positions import RopeConfig, Shape
from polyformer.attention.positions.rope import Rope, frequencies
from polyformer.attention.positions.rope_extensions import (
    InterpolationConfig,
    NtkConfig,
    RopeExtensionConfig,
    YarnConfig,
)
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

CPU = torch.device("cpu")


def rope(width: int = 8, **options: object) -> Rope:
    return RopeConfig.from_dict(options).build(Shape(hidden_size=16, head_size=width))


def rotated(position: Rope, x: Tensor, start: int = 0) -> Tensor:
    """x [B, H, T, D] as queries whose first slot is `start`."""
    length = x.shape[2]
    return position.rotate(x, x, Context(length, start + length), SITE[0])[0]


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.34])
@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_each_pair_is_turned_by_its_angle(layout: str, fraction: float):
    x = torch.randn(2, 3, 5, 12, dtype=torch.float64)
    position = rope(12, layout=layout, fraction=fraction, base=77.0)
    naive, actual = NaiveRope(position, 0), rotated(position, x, start=4)
    for i in range(5):
        expected = torch.stack([naive.rotated(vector, 4 + i) for vector in x[:, :, i].flatten(0, 1)])
        torch.testing.assert_close(actual[:, :, i].flatten(0, 1), expected, rtol=0, atol=1e-12)


def test_layers_turn_by_bases_of_their_own():
    """Two bases in turn: each layer is a scheme of its base alone, within one call too."""
    x, context = torch.randn(1, 2, 5, 8, dtype=torch.float64), Context(5, 5)
    position = rope(bases=(77.0, 500.0))
    for layer in range(5):
        alone = rope(base=(77.0, 500.0)[layer % 2])
        site = dataclasses.replace(SITE[0], layer=layer)
        assert torch.equal(position.rotate(x, x, context, site)[0], rotated(alone, x))
    with pytest.raises(InputError, match=r"bases\[1\]: expected a number above 1, got 1"):
        rope(bases=[5.0, 1.0])


def test_the_first_position_is_left_alone_and_lengths_are_kept():
    x = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    actual = rotated(rope(), x)
    assert torch.equal(actual[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(actual.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_scores_depend_on_the_distance_alone(layout: str):
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    position = rope(layout=layout)
    scores = [(rotated(position, q, p + 3) * rotated(position, k, p)).sum() for p in (0, 5, 40_000)]
    torch.testing.assert_close(torch.stack(scores[1:]), scores[0].expand(2), rtol=0, atol=1e-10)
    assert abs(scores[0] - (q * k).sum()) > 1e-3


def test_positions_not_slots_turn():
    """Left padding and documents: the same tokens at other slots."""
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    pos = torch.tensor([[0, 0, 0, 1, 2]])
    padded = torch.cat([torch.randn(1, 2, 2, 8, dtype=torch.float64), x], 2)
    q, k = rope().rotate(padded, padded[:, :1], Context(5, 5, q_pos=pos, kv_pos=pos), SITE[0])
    torch.testing.assert_close(q[:, :, 2:], rotated(rope(), x), rtol=0, atol=1e-14)
    torch.testing.assert_close(k[:, :, 2:], rotated(rope(), x[:, :1]), rtol=0, atol=1e-14)


def test_far_positions_are_exact_in_float32():
    """Angles made in float32 would be wrong in the second digit here."""
    p = 1_000_003
    actual = rotated(rope(2), torch.tensor([[[[1.0, 0.0]]]]), start=p)
    torch.testing.assert_close(actual.flatten(), torch.tensor([math.cos(p), math.sin(p)]), rtol=0, atol=1e-6)


def test_the_waves_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(
        "polyformer.attention.positions.rope.frequencies", lambda *a: calls.append(a) or frequencies(*a)
    )
    position, context, x = rope(), Context(4, 4), torch.randn(1, 1, 4, 8)
    for site in SITE:
        position.rotate(x, x, context, site)
    assert len(calls) == 1
    position.rotate(x.double(), x.double(), context, SITE[0])
    assert len(calls) == 2


def theta(extension: RopeExtensionConfig | None, width: int = 16, base: float = 10000.0) -> Tensor:
    return frequencies(RopeConfig(base=base, extension=extension), width, CPU)


def test_interpolation_divides_positions():
    torch.testing.assert_close(theta(InterpolationConfig(factor=4.0)), theta(None) / 4, rtol=1e-14, atol=0)


def test_ntk_keeps_the_fastest_and_slows_the_slowest():
    """A base of base * factor^(W / (W - 2)); one pair alone has nothing slower."""
    scaled, plain = theta(NtkConfig(factor=4.0)), theta(None)
    assert scaled[0] == plain[0] == 1
    assert math.isclose(scaled[-1], plain[-1] / 4)
    base = 10000.0 * 4 ** (16 / 14)
    expected = torch.tensor([base ** (-2 * m / 16) for m in range(8)], dtype=torch.float64)
    torch.testing.assert_close(scaled, expected, rtol=1e-13, atol=0)
    assert theta(NtkConfig(factor=4.0), width=2).tolist() == [1.0]


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    """By how often a pair turns over the old length: above beta_fast as it was, below beta_slow divided."""
    scaled, plain = theta(YarnConfig(factor=8.0, original_max_positions=2048), 128), theta(None, 128)
    turns = 2048 * plain / (2 * math.pi)
    share = (plain / scaled - 1) / 7  # 0 as it was, 1 interpolated
    assert torch.equal(scaled[turns > 33], plain[turns > 33])
    torch.testing.assert_close(scaled[turns < 0.8], plain[turns < 0.8] / 8, rtol=1e-13, atol=0)
    between = share[(turns < 30) & (turns > 1.2)]
    assert len(between) > 5
    assert (between.diff() > 0).all()
    assert (scaled.diff() < 0).all()


@pytest.mark.parametrize("attention_factor", [None, 1.5])
def test_yarns_temperature_multiplies_scores(attention_factor: float | None):
    """Both sides by 0.1 ln(factor) + 1, so scores by its square; a fraction that is not rotated stays."""
    extension = YarnConfig(factor=8.0, original_max_positions=64, attention_factor=attention_factor)
    size = 0.1 * math.log(8) + 1 if attention_factor is None else attention_factor
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    actual = rotated(
        RopeConfig(fraction=0.5, extension=extension).build(Shape(hidden_size=8, head_size=8)), x
    )
    torch.testing.assert_close(
        actual[..., :4].norm(dim=-1), x[..., :4].norm(dim=-1) * size, rtol=1e-13, atol=0
    )
    assert torch.equal(actual[..., 4:], x[..., 4:])


def test_extensions_are_read_from_files():
    data = {"kind": "rope", "extension": {"kind": "yarn", "factor": 4, "original_max_positions": 128}}
    config = RopeConfig.from_dict(data)
    assert config.extension == YarnConfig(factor=4.0, original_max_positions=128)
    assert RopeConfig.from_dict(config.to_dict()) == config
    with pytest.raises(InputError, match="extension: 'factor' is missing"):
        RopeConfig.from_dict({"kind": "rope", "extension": "ntk"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "thirds"}, "layout"),
        ({"fraction": 0.0}, r"fraction: expected a share in \(0, 1\], got 0\.0"),
        ({"fraction": 1.5}, r"fraction: expected a share in \(0, 1\], got 1\.5"),
        ({"base": 1.0}, r"base: expected a number above 1, got 1\.0"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        RopeConfig.from_dict(options)
    with pytest.raises(InputError, match=message):
        RopeConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0.5}, r"factor: expected 1 or more, got 0\.5"),
        ({"original_max_positions": 0}, "original_max_positions: expected 1 or more, got 0"),
        ({"beta_slow": 40.0}, r"beta_slow, beta_fast: expected 0 < beta_slow < beta_fast, got 40.0, 32.0"),
        ({"beta_slow": 0.0}, r"beta_slow, beta_fast: expected 0 < beta_slow < beta_fast, got 0.0, 32.0"),
        ({"attention_factor": 0.0}, "attention_factor: expected a number above 0, got 0.0"),
    ],
)
def test_extensions_are_checked(options: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        YarnConfig(**{"factor": 2.0, "original_max_positions": 8, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "fraction", "channels"), [(7, 1.0, 7), (12, 0.25, 3), (8, 0.1, 0)])
def test_a_width_without_pairs_is_refused(width: int, fraction: float, channels: int):
    with pytest.raises(InputError) as caught:
        rope(width, fraction=fraction)
    assert str(caught.value) == (
        f"fraction: expected an even number of rotated channels, got {channels} "
        f"({fraction} of head_size {width}); change one of the two, or the "
        "rotary_size of latent attention"
    )
