"""RoPE against transformers: Llama, GPT-NeoX, GPT-J, and the frequencies of every extension."""

import pytest
import torch
from torch import Tensor

from polyformer.position import RopeConfig, Shape, Site
from polyformer.position.rope.context_extension import (
    InterpolationConfig,
    Llama3Config,
    NtkConfig,
    RopeExtensionConfig,
    YarnConfig,
)
from polyformer.position.rope.rope import frequencies
from polyformer.sequence.context import Context
from polyformer.stack import AttentionConfig, MultiHeadAttention

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402 - after the check that it is there
from transformers.models.gpt_neox import modeling_gpt_neox as neox  # noqa: E402
from transformers.models.gptj import modeling_gptj as gptj  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402

WIDTH, HEADS, KEY_HEADS, HEAD = 24, 4, 2, 8
SITE = Site(0, lambda x: x, lambda x: x)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def llama_config(
    rope: dict[str, object], head: int = HEAD, positions: int = 64
) -> "transformers.LlamaConfig":
    return transformers.LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=head,
        max_position_embeddings=positions,
        rope_parameters=rope,
        attn_implementation="sdpa",  # the eager form has a softmax in float32
    )


def waves(config: RopeConfig, width: int, pos: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, width / 2] in float64: theirs are computed in float32."""
    angles = pos.double().unsqueeze(-1) * frequencies(config, width, pos.device)
    size = 1.0 if config.extension is None else config.extension.size
    return angles.cos() * size, angles.sin() * size


@pytest.mark.parametrize(
    ("options", "extension"),
    [(PLAIN, None), (YARN, YarnConfig(factor=4.0, original_max_positions=16))],
    ids=["plain", "yarn"],
)
def test_llama_attention(options: dict[str, object], extension: RopeExtensionConfig | None):
    """Grouped heads, causal, from position 5 on: outputs and the gradients of all weights."""
    torch.manual_seed(0)
    theirs = llama.LlamaAttention(llama_config(options), 0).double()
    attention = AttentionConfig(
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_size=HEAD, bias=False
    )
    ours, config = attention.build(WIDTH).double(), RopeConfig(extension=extension)
    weights = list(zip(projections(ours), (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj)))
    for mine, other in weights:
        mine.weight.data.copy_(other.weight)
    x, pos = torch.randn(2, 7, WIDTH, dtype=torch.float64), torch.arange(5, 12)
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1).expand(2, 1, 7, 7)
    position = config.build(Shape(hidden_size=WIDTH, num_heads=HEADS, head_size=HEAD))
    actual, _ = ours(x, Context(7, 7, causal=True, q_pos=pos, kv_pos=pos), position)
    rotary = llama.LlamaRotaryEmbedding(llama_config(options))
    coarse, _ = theirs(x, rotary(x, pos.expand(2, -1)), mask)
    torch.testing.assert_close(actual, coarse, rtol=0, atol=1e-5)
    exact = tuple(torch.cat([item, item], -1).expand(2, -1, -1) for item in waves(config, HEAD, pos))
    expected, _ = theirs(x, exact, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    actual.sin().sum().backward()
    expected.sin().sum().backward()
    for mine, other in weights:
        torch.testing.assert_close(mine.weight.grad, other.weight.grad, rtol=1e-10, atol=1e-10)


def projections(ours: MultiHeadAttention) -> list[torch.nn.Linear]:
    return [ours.query, ours.key, ours.value, ours.output]


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


def test_gpt_j_turns_pairs():
    q, k = torch.randn(2, 2, 3, 5, 12, dtype=torch.float64)
    config = RopeConfig(layout="pairs", fraction=2 / 3)
    table = gptj.create_sinusoidal_positions(20, 8)[3:8].expand(2, -1, -1)
    for x, actual in zip((q, k), rotated(config, 12, q, k)):
        coarse, exact = [
            gptj.apply_rotary_pos_emb(x[..., :8].transpose(1, 2), sin, cos).transpose(1, 2)
            for sin, cos in (
                table.double().chunk(2, -1),
                [item.expand(2, -1, -1) for item in reversed(waves(config, 8, torch.arange(3, 8)))],
            )
        ]
        torch.testing.assert_close(actual[..., :8], coarse, rtol=0, atol=1e-5)
        torch.testing.assert_close(actual[..., :8], exact, rtol=1e-12, atol=1e-12)
        assert torch.equal(actual[..., 8:], x[..., 8:])


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
        config = llama_config({"rope_type": kind, "rope_theta": base, **options}, head, 4096)
        theta, size = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        ours = frequencies(RopeConfig(base=base, extension=extension), head, torch.device("cpu"))
        torch.testing.assert_close(ours, theta.double(), rtol=1e-5, atol=0)
        assert abs(extension.size - size) < 1e-12
