"""Public libraries' sparse attention, alone: without projections, on the inputs that ours gets.

Each takes part where the member has a counterpart in it, and says so where it has none.
"""

import contextlib
import io
import warnings

import torch
from torch import Tensor, nn

from polyformer.attention import PerformerConfig
from polyformer.bench.benchmark_case import AbsentError, Attention, BenchmarkCase
from polyformer.patterns import BlockWindow, Causal, Full, Global, GlobalEnd, Or, Pattern, Random, Window
from polyformer.position import AlibiConfig

MISSING = AbsentError("not installed (pip install 'polyformer[peers]')")


def parts(case: BenchmarkCase) -> list[Pattern]:
    """The patterns that the member unites; none where it is no pattern or has a position scheme."""
    if case.member.pattern is None or case.member.position is not None:
        raise case.no_counterpart()
    leaves, left = [], [case.member.pattern]
    while left:
        pattern = left.pop()
        if isinstance(pattern, Or):
            left += [pattern.right, pattern.left]
        else:
            leaves.append(pattern)
    return leaves


def local_attention(case: BenchmarkCase) -> Attention:
    """`local-attention`: whole blocks, so `BlockWindow` is what it has, and `Window` sees some keys less."""
    own = parts(case)
    pattern = own[0]
    if isinstance(pattern, Window) and pattern.dilation == 1 and pattern.after in (0, pattern.before):
        size, causal = pattern.before, case.causal or pattern.after == 0
    elif isinstance(pattern, BlockWindow) and (pattern.before, pattern.after) in ((1, 1), (1, 0)):
        size, causal = pattern.size, case.causal
        if not causal and pattern.after == 0:
            raise case.no_counterpart()
    else:
        raise case.no_counterpart()
    if len(own) > 1:
        raise case.no_counterpart()
    try:
        from local_attention import LocalAttention
    except ImportError:
        raise MISSING from None
    return LocalAttention(
        dim=case.width,
        window_size=size,
        causal=causal,
        look_backward=1,
        look_forward=int(not causal),
        autopad=True,
        use_rotary_pos_emb=False,
    )


def x_transformers(case: BenchmarkCase) -> Attention:
    """x-transformers' `Attend`, over every key: full or causal, alone or with ALiBi."""
    pattern, position = case.member.pattern, case.member.position
    if not isinstance(pattern, Full | Causal) or not isinstance(position, AlibiConfig | None):
        raise case.no_counterpart()
    try:
        from x_transformers.attend import Attend  # pyright: ignore[reportMissingImports]
        from x_transformers.x_transformers import (  # pyright: ignore[reportMissingImports]
            AlibiPositionalBias,
        )
    except ImportError:
        raise MISSING from None
    causal = case.causal or isinstance(pattern, Causal)
    attend = Attend(causal=causal, heads=case.heads, scale=case.width**-0.5, flash=position is None)
    if position is None:
        return lambda q, k, v: attend(q, k, v)[0]
    biases = AlibiPositionalBias(case.heads).to(case.device, getattr(torch, case.dtype))

    def with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, attn_bias=biases(case.length, case.length))[0]

    return with_alibi


def performer_pytorch(case: BenchmarkCase) -> Attention:
    """performer-pytorch's `FastAttention` with our directions; on a CPU its causal form is the slow one.

    It adds 1e-4 to every feature, which ours does not.
    """
    config = case.member.mechanism
    if not isinstance(config, PerformerConfig) or config.map != "positive":
        raise case.no_counterpart("it has performer with positive features")
    ours = config.build(case.heads, case.width).get_submodule("directions")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            from performer_pytorch import FastAttention  # pyright: ignore[reportMissingImports]

            attention = FastAttention(case.width, config.features, causal=case.causal)
    except ImportError:
        raise MISSING from None
    attention.projection_matrix = ours(torch.zeros((), dtype=getattr(torch, case.dtype), device=case.device))
    return attention


class FixedOutput(nn.Module):
    """In the place of a projection: outputs `value`, whatever it reads."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """`value`."""
        return self.value


def longformer(case: BenchmarkCase) -> Attention:
    """transformers' Longformer: `Window(w)` (its `attention_window` is 2 w), with `Global(g)` or without."""
    own = parts(case)
    window = next((pattern for pattern in own if isinstance(pattern, Window)), None)
    tokens = next((pattern.tokens for pattern in own if isinstance(pattern, Global)), 0)
    if window is None or len(own) != 1 + bool(tokens) or window.dilation > 1 or window.after != window.before:
        raise case.no_counterpart()
    if case.causal:
        raise case.no_counterpart("it has no causal form")
    if case.length % (2 * window.before):
        raise case.no_counterpart(f"its length is a multiple of {2 * window.before}")
    try:
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
    except ImportError:
        raise MISSING from None
    shape = case.batch, case.length
    layer = LongformerSelfAttention(
        LongformerConfig(
            hidden_size=case.heads * case.width,
            num_attention_heads=case.heads,
            attention_window=[2 * window.before],
            attention_probs_dropout_prob=0.0,
        ),
        layer_id=0,
    )
    names = [f"{name}{end}" for end in ("", "_global") for name in ("query", "key", "value")]
    for name in names:
        setattr(layer, name, FixedOutput())
    marked = torch.zeros(shape, dtype=torch.bool, device=case.device)
    marked[:, :tokens] = True
    masked = torch.zeros_like(marked)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.permute(2, 0, 1, 3).flatten(2) for x in (q, k, v))  # [T, B, E]
        # The layer divides its queries in place.
        for name, x in zip(names, (query.clone(), key, value, query[:tokens].clone(), key, value)):
            getattr(layer, name).value = x
        return (
            layer(
                query.detach().transpose(0, 1),
                attention_mask=marked.to(q.dtype) * 1e4,
                is_index_masked=masked,
                is_index_global_attn=marked,
                is_global_attn=tokens > 0,
            )[0]
            .unflatten(-1, (case.heads, -1))
            .transpose(1, 2)
        )

    return attention


def bigbird(case: BenchmarkCase) -> Attention:
    """transformers' BigBird: `BlockWindow(s) | Global(s) | GlobalEnd(s) | Random(r, s)`.

    Its queries see `r` random blocks, ours `r` and those that drew them. Outside training it draws none and
    takes block 0 in their place, at the same cost. From version 5 on it also writes all weights into a table
    [B, H, T, T] at every call.
    """
    own = sorted(parts(case), key=lambda pattern: type(pattern).__name__)
    if [type(pattern) for pattern in own] != [BlockWindow, Global, GlobalEnd, Random] or case.causal:
        raise case.no_counterpart("it has BlockWindow(s) | Global(s) | GlobalEnd(s) | Random(r, s) alone")
    window, start, end, random = own
    assert isinstance(window, BlockWindow)
    assert isinstance(start, Global)
    assert isinstance(end, GlobalEnd)
    assert isinstance(random, Random)
    size = window.size
    if (window.before, window.after, start.tokens, end.tokens, random.size) != (1, 1, size, size, size):
        raise case.no_counterpart("its blocks all have one size, its window three of them")
    least = (5 + 2 * random.blocks) * size
    if case.length % size or case.length <= least:
        raise case.no_counterpart(f"its length is a multiple of {size} above {least}")
    return BigBird(case, size, random.blocks)


class BigBird(nn.Module):
    """The core of transformers' `BigBirdBlockSparseAttention`, and the masks of a text without padding."""

    def __init__(self, case: BenchmarkCase, size: int, blocks: int):
        super().__init__()
        try:
            from transformers import BigBirdConfig
            from transformers.models.big_bird.modeling_big_bird import (
                BigBirdBlockSparseAttention,
                BigBirdModel,
            )
        except ImportError:
            raise MISSING from None
        config = BigBirdConfig(
            hidden_size=case.heads * case.width,
            num_attention_heads=case.heads,
            block_size=size,
            num_random_blocks=blocks,
            max_position_embeddings=case.length,
        )
        self.core = BigBirdBlockSparseAttention(config, seed=0).train(case.backward)
        self.case, self.size, self.blocks = case, size, blocks
        seen = torch.ones(case.batch, case.length, dtype=getattr(torch, case.dtype), device=case.device)
        masks = BigBirdModel.create_masks_for_block_sparse_attn(seen, size)
        self.blocked, self.band, self.rows, self.columns = masks

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """transformers' block-sparse attention on the heads."""
        case = self.case
        return self.core.bigbird_block_sparse_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            self.band,
            self.rows,
            self.columns,
            self.blocked,
            self.blocked,
            case.heads,
            self.blocks,
            case.width,
            self.size,
            self.size,
            case.batch,
            case.length,
            case.length,
            seed=0,
            plan_from_length=None,
            plan_num_rand_blocks=None,
        )[0].transpose(1, 2)
