"""RoPE against transformers: GPT-NeoX, and the frequencies of every extension.

Whole models of Llama and GPT-J are compared in test_families.
"""

import pytest
import torch
from torch import Tensor

from polyformer.attention.positions import RopeConfig, Shape, Site
from polyformer.attention.positions.rope import frequencies
from polyformer.attention.positions.rope_extensions import (
    DynamicNtkConfig,
    InterpolationConfig,
    Llama3Config,
    LongRopeConfig,
    NtkConfig,
    YarnConfig,
)
from polyformer.core.sequence.context import Context

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402 - after the check that it is there
from transformers.models.gpt_neox import modeling_gpt_neox as neox  # noqa: E402

WIDTH, HEADS = 24, 4
CPU = torch.device("cpu")
SITE = Site(0, lambda x: x, lambda x: x)


def waves(config: RopeConfig, width: int, pos: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, width / 2] in float64: theirs are computed in float32."""
    angles = pos.double().unsqueeze(-1) * frequencies(config, width, pos.device)
    size = 1.0 if config.extension is None else config.extension.channel_scale
    return angles.cos() * size, angles.sin() * size


def rotated(config: RopeConfig, head: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    position = config.build(Shape(hidden_size=WIDTH, head_size=head))
    return position.rotate(q, k, Context(q.shape[2], q.shape[2] + 3), SITE)


@pytest.mark.parametrize(("fraction", "width"), [(1.0, 12), (0.5, 6), (0.34, 4)])
def test_gpt_neox_turns_a_fraction_in_halves(fraction: float, width: int):
    q, k = torch.randn(2, 2, 3, 5, 12, dtype=torch.float64)
    config = RopeConfig(fraction=fraction, base=500.0)
    cos, sin = (torch.cat([item, item], -1).unsqueeze(0) for item in waves(config, width, torch.arange(3, 8)))
    expected = neox.apply_rotary_pos_emb(q, k, cos, sin)
    for actual, other in zip(rotated(config, 12, q, k), expected):
        torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", [8, 64, 128])
@pytest.mark.parametrize("base", [10000.0, 500_000.0])
def test_frequencies_of_every_extension(head: int, base: float):
    """In the numbers that Llama models are extended with; theirs are float32."""
    old = {"original_max_position_embeddings": 512}
    yarn = {"original_max_position_embeddings": 4096, "factor": 16.0}
    dynamic = 4.0 * 10_000 / 4096 - 3.0  # how much of a stretch `dynamic` with factor 4 is at length 10000
    cases = [
        ("linear", {"factor": 4.0}, InterpolationConfig(factor=4.0), None),
        ("dynamic", {"factor": 4.0}, NtkConfig(factor=dynamic), 10_000),
        ("yarn", yarn, YarnConfig(factor=16.0, original_max_positions=4096), None),
        (
            "yarn",
            {**yarn, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.2},
            YarnConfig(
                factor=16.0, original_max_positions=4096, beta_fast=8, beta_slow=2, attention_factor=1.2
            ),
            None,
        ),
        (
            "llama3",
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **old},
            Llama3Config(factor=8.0, original_max_positions=512),
            None,
        ),
    ]
    for kind, options, extension, length in cases:
        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            head_dim=head,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": kind, "rope_theta": base, **options},
        )
        theta, size = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
        ours = frequencies(RopeConfig(base=base, extension=extension), head, CPU)
        torch.testing.assert_close(ours, theta.double(), rtol=1e-5, atol=0)
        assert abs(extension.channel_scale - size) < 1e-12


@pytest.mark.parametrize("base", [10000.0, 500_000.0])
def test_frequencies_by_length(base: float):
    """Of short and of long texts; `dynamic` at the lengths to which ours rounds up."""
    pairs = torch.linspace(1, 8, 32).tolist()
    options = {"short_factor": [1.0 + x / 50 for x in pairs], "long_factor": pairs}
    cases = [
        (
            "dynamic",
            {"factor": 4.0},
            DynamicNtkConfig(factor=4.0, original_max_positions=512),
            [512, 1024, 2048],
        ),
        (
            "longrope",
            {**options, "factor": 8.0, "original_max_position_embeddings": 512},
            LongRopeConfig(
                factor=8.0,
                original_max_positions=512,
                **{name: tuple(numbers) for name, numbers in options.items()},
            ),
            [512, 1024],
        ),
    ]
    for kind, theirs, extension, lengths in cases:
        config = transformers.LlamaConfig(
            hidden_size=64,
            num_attention_heads=1,
            max_position_embeddings=512,
            rope_parameters={"rope_type": kind, "rope_theta": base, **theirs},
        )
        plain = frequencies(RopeConfig(base=base, extension=extension), 64, CPU)
        bands = [theta for _, theta in extension.bands(plain, base, lengths[-1] - 1)]
        assert len(bands) == len(lengths)
        for length, ours in zip(lengths, bands):
            theta, size = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
            torch.testing.assert_close(ours, theta.double(), rtol=1e-5, atol=0)
            assert abs(extension.channel_scale - size) < 1e-12
