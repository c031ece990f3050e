"""Public libraries' sparse attention, alone: without projections, on the inputs that ours gets.

Each takes part where the member has a counterpart in it, and says so where it has none.
"""

import contextlib
import io
import warnings

import torch
from torch import Tensor, nn

from polyformer.attention import PerformerConfig
from polyformer.bench.contest import AbsentError, Attention, Contest
from polyformer.patterns import BlockWindow, Causal, Full, Global, GlobalEnd, Or, Pattern, Random, Window
from polyformer.position import AlibiConfig

MISSING = AbsentError("not installed (pip install 'polyformer[peers]')")


def parts(contest: Contest) -> list[Pattern]:
    """The patterns that the member unites; none where it is no pattern or has a position scheme."""
    if contest.member.pattern is None or contest.member.position is not None:
        raise contest.no_counterpart()
    found, left = [], [contest.member.pattern]
    while left:
        one = left.pop()
        if isinstance(one, Or):
            left += [one.right, one.left]
        else:
            found.append(one)
    return found


def local_attention(contest: Contest) -> Attention:
    """`local-attention`: whole blocks, so `BlockWindow` is what it has, and `Window` sees some keys less."""
    own = parts(contest)
    one = own[0]
    if isinstance(one, Window) and one.dilation == 1 and one.after in (0, one.before):
        size, causal = one.before, contest.causal or one.after == 0
    elif isinstance(one, BlockWindow) and (one.before, one.after) in ((1, 1), (1, 0)):
        size, causal = one.size, contest.causal
        if not causal and one.after == 0:
            raise contest.no_counterpart()
    else:
        raise contest.no_counterpart()
    if len(own) > 1:
        raise contest.no_counterpart()
    try:
        from local_attention import LocalAttention
    except ImportError:
        raise MISSING from None
    return LocalAttention(
        dim=contest.width,
        window_size=size,
        causal=causal,
        look_backward=1,
        look_forward=int(not causal),
        autopad=True,
        use_rotary_pos_emb=False,
    )


def x_transformers(contest: Contest) -> Attention:
    """x-transformers' `Attend`, over every key: full or causal, alone or with ALiBi."""
    pattern, position = contest.member.pattern, contest.member.position
    if not isinstance(pattern, Full | Causal) or not isinstance(position, AlibiConfig | None):
        raise contest.no_counterpart()
    try:
        from x_transformers.attend import Attend  # pyright: ignore[reportMissingImports]
        from x_transformers.x_transformers import (  # pyright: ignore[reportMissingImports]
            AlibiPositionalBias,
        )
    except ImportError:
        raise MISSING from None
    causal = contest.causal or isinstance(pattern, Causal)
    attend = Attend(causal=causal, heads=contest.heads, scale=contest.width**-0.5, flash=position is None)
    if position is None:
        return lambda q, k, v: attend(q, k, v)[0]
    biases = AlibiPositionalBias(contest.heads).to(contest.device, getattr(torch, contest.dtype))

    def with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, attn_bias=biases(contest.length, contest.length))[0]

    return with_alibi


def performer_pytorch(contest: Contest) -> Attention:
    """performer-pytorch's `FastAttention` with our directions; on a CPU its causal form is the slow one.

    It adds 1e-4 to every feature, which ours does not.
    """
    config = contest.member.mechanism
    if not isinstance(config, PerformerConfig) or config.map != "positive":
        raise contest.no_counterpart("it has performer with positive features")
    ours = config.build(contest.heads, contest.width).get_submodule("directions")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            from performer_pytorch import FastAttention  # pyright: ignore[reportMissingImports]

            attention = FastAttention(contest.width, config.features, causal=contest.causal)
    except ImportError:
        raise MISSING from None
    attention.projection_matrix = ours(
        torch.zeros((), dtype=getattr(torch, contest.dtype), device=contest.device)
    )
    return attention


class Given(nn.Module):
    """In the place of a projection: gives what it was told to, whatever it reads."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def longformer(contest: Contest) -> Attention:
    """transformers' Longformer: `Window(w)` (its `attention_window` is 2 w), with `Global(g)` or without."""
    own = parts(contest)
    window = next((one for one in own if isinstance(one, Window)), None)
    tokens = next((one.tokens for one in own if isinstance(one, Global)), 0)
    if window is None or len(own) != 1 + bool(tokens) or window.dilation > 1 or window.after != window.before:
        raise contest.no_counterpart()
    if contest.causal:
        raise contest.no_counterpart("it has no causal form")
    if contest.length % (2 * window.before):
        raise contest.no_counterpart(f"its length is a multiple of {2 * window.before}")
    try:
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
    except ImportError:
        raise MISSING from None
    shape = contest.batch, contest.length
    layer = LongformerSelfAttention(
        LongformerConfig(
            hidden_size=contest.heads * contest.width,
            num_attention_heads=contest.heads,
            attention_window=[2 * window.before],
            attention_probs_dropout_prob=0.0,
        ),
        layer_id=0,
    )
    names = [f"{name}{end}" for end in ("", "_global") for name in ("query", "key", "value")]
    for name in names:
        setattr(layer, name, Given())
    marked = torch.zeros(shape, dtype=torch.bool, device=contest.device)
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
            .unflatten(-1, (contest.heads, -1))
            .transpose(1, 2)
        )

    return attention


def bigbird(contest: Contest) -> Attention:
    """transformers' BigBird: `BlockWindow(s) | Global(s) | GlobalEnd(s) | Random(r, s)`.

    Its queries see `r` random blocks, ours `r` and those that drew them. Outside training it draws none and
    takes block 0 in their place, at the same cost. From version 5 on it also writes all weights into a table
    [B, H, T, T] at every call.
    """
    own = sorted(parts(contest), key=lambda one: type(one).__name__)
    if [type(one) for one in own] != [BlockWindow, Global, GlobalEnd, Random] or contest.causal:
        raise contest.no_counterpart("it has BlockWindow(s) | Global(s) | GlobalEnd(s) | Random(r, s) alone")
    window, start, end, random = own
    assert isinstance(window, BlockWindow)
    assert isinstance(start, Global)
    assert isinstance(end, GlobalEnd)
    assert isinstance(random, Random)
    size = window.size
    if (window.before, window.after, start.tokens, end.tokens, random.size) != (1, 1, size, size, size):
        raise contest.no_counterpart("its blocks all have one size, its window three of them")
    least = (5 + 2 * random.blocks) * size
    if contest.length % size or contest.length <= least:
        raise contest.no_counterpart(f"its length is a multiple of {size} above {least}")
    return BigBird(contest, size, random.blocks)


class BigBird(nn.Module):
    """The core of transformers' `BigBirdBlockSparseAttention`, and the masks of a text without padding."""

    def __init__(self, contest: Contest, size: int, blocks: int):
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
            hidden_size=contest.heads * contest.width,
            num_attention_heads=contest.heads,
            block_size=size,
            num_random_blocks=blocks,
            max_position_embeddings=contest.length,
        )
        self.core = BigBirdBlockSparseAttention(config, seed=0).train(contest.backward)
        self.contest, self.size, self.blocks = contest, size, blocks
        seen = torch.ones(
            contest.batch, contest.length, dtype=getattr(torch, contest.dtype), device=contest.device
        )
        made = BigBirdModel.create_masks_for_block_sparse_attn(seen, size)
        self.blocked, self.band, self.rows, self.columns = made

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contest = self.contest
        return self.core.bigbird_block_sparse_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            self.band,
            self.rows,
            self.columns,
            self.blocked,
            self.blocked,
            contest.heads,
            self.blocks,
            contest.width,
            self.size,
            self.size,
            contest.batch,
            contest.length,
            contest.length,
            seed=0,
            plan_from_length=None,
            plan_num_rand_blocks=None,
        )[0].transpose(1, 2)
