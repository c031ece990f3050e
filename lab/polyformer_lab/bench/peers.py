"""Attention of public libraries, without projections, on the same inputs as ours.

Each library takes part if it has a counterpart of the member, and otherwise reports that it has none.
"""

import contextlib
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms import LinformerConfig, LSHConfig, PerformerConfig, RoutingConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrenceConfig
from polyformer.attention.mechanisms.recurrence.fused_scan import fused_scan, missing_package
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.attention.patterns import (
    BlockWindow,
    Causal,
    Full,
    Global,
    GlobalEnd,
    Or,
    Pattern,
    Random,
    Window,
)
from polyformer.attention.positions import AlibiConfig
from polyformer_lab.bench.member import Attention, BenchmarkCase
from polyformer_lab.bench.rows import AbsentError


def parts(case: BenchmarkCase) -> list[Pattern]:
    """Return the patterns that the member unites.

    Raises `AbsentError` for a member that is no pattern or has a position scheme.
    """
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
    """Return `local-attention`: whole blocks like `BlockWindow`; `Window` attends to fewer keys."""
    pattern, *others = parts(case)
    if others:
        raise case.no_counterpart()
    if isinstance(pattern, Window) and pattern.dilation == 1 and pattern.after in (0, pattern.before):
        size, causal = pattern.before, case.causal or pattern.after == 0
    elif isinstance(pattern, BlockWindow) and (pattern.before, pattern.after) in ((1, 1), (1, 0)):
        size, causal = pattern.size, case.causal
        if not causal and pattern.after == 0:
            raise case.no_counterpart()
    else:
        raise case.no_counterpart()
    from local_attention import LocalAttention

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
    """Return x-transformers' `Attend` over every key: full or causal, without positions or with ALiBi."""
    pattern, position = case.member.pattern, case.member.position
    if not isinstance(pattern, Full | Causal) or not isinstance(position, AlibiConfig | None):
        raise case.no_counterpart()
    from x_transformers.attend import Attend  # pyright: ignore[reportMissingImports]
    from x_transformers.x_transformers import (  # pyright: ignore[reportMissingImports]
        AlibiPositionalBias,
    )

    causal = case.causal or isinstance(pattern, Causal)
    attend = Attend(causal=causal, heads=case.heads, scale=case.width**-0.5, flash=position is None)
    if position is None:
        return lambda q, k, v: attend(q, k, v)[0]
    biases = AlibiPositionalBias(case.heads).to(**case.place)

    def with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, attn_bias=biases(case.length, case.length))[0]

    return with_alibi


def performer_pytorch(case: BenchmarkCase) -> Attention:
    """Return performer-pytorch's `FastAttention` with our directions; on a CPU its causal form is the slow
    form.

    It adds 1e-4 to every feature, which ours does not.
    """
    config = case.member.mechanism
    if not isinstance(config, PerformerConfig) or config.map != "positive":
        raise case.no_counterpart("it has performer with positive features")
    ours = config.build(case.heads, case.width).get_submodule("directions")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from performer_pytorch import FastAttention  # pyright: ignore[reportMissingImports]

        attention = FastAttention(case.width, config.features, causal=case.causal)
    attention.projection_matrix = ours(torch.zeros((), **case.place))
    return attention


class FixedOutput(nn.Module):
    """A replacement of a projection: it outputs `value` for any input."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return `value`."""
        return self.value


def longformer(case: BenchmarkCase) -> Attention:
    """Return transformers' Longformer: `Window(w)` (its `attention_window` is 2 w), perhaps with
    `Global(g)`.
    """
    own = parts(case)
    window = next((pattern for pattern in own if isinstance(pattern, Window)), None)
    tokens = next((pattern.tokens for pattern in own if isinstance(pattern, Global)), 0)
    if window is None or len(own) != 1 + bool(tokens) or window.dilation > 1 or window.after != window.before:
        raise case.no_counterpart()
    if case.causal:
        raise case.no_counterpart("it has no causal form")
    if case.length % (2 * window.before):
        raise case.no_counterpart(f"its length is a multiple of {2 * window.before}")
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

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
    """Return transformers' BigBird: `BlockWindow(s) | Global(s) | GlobalEnd(s) | Random(r, s)`.

    Its queries attend to `r` random blocks, ours to `r` and to the blocks that drew them. Outside training it
    draws none and uses block 0 instead, at the same cost. From version 5 on it also writes all weights into a
    table [B, H, T, T] at every call.
    """
    own = parts(case)
    random = next((pattern for pattern in own if isinstance(pattern, Random)), None)
    size = 0 if random is None else random.size
    if (
        random is None
        or set(own) != {BlockWindow(size), Global(size), GlobalEnd(size), random}
        or case.causal
    ):
        raise case.no_counterpart("it has BlockWindow(s) | Global(s) | GlobalEnd(s) | Random(r, s) alone")
    least = (5 + 2 * random.blocks) * size
    if case.length % size or case.length <= least:
        raise case.no_counterpart(f"its length is a multiple of {size} above {least}")
    return BigBird(case, size, random.blocks)


class BigBird(nn.Module):
    """The core of transformers' `BigBirdBlockSparseAttention`, and the masks of a text without padding."""

    def __init__(self, case: BenchmarkCase, size: int, blocks: int):
        super().__init__()
        from transformers import BigBirdConfig
        from transformers.models.big_bird.modeling_big_bird import (
            BigBirdBlockSparseAttention,
            BigBirdModel,
        )

        config = BigBirdConfig(
            hidden_size=case.heads * case.width,
            num_attention_heads=case.heads,
            block_size=size,
            num_random_blocks=blocks,
            max_position_embeddings=case.length,
        )
        self.core = BigBirdBlockSparseAttention(config, seed=0).train(case.backward)
        seen = torch.ones(case.batch, case.length, **case.place)
        blocked, *masks = BigBirdModel.create_masks_for_block_sparse_attn(seen, size)
        self.masks: tuple[Any, ...] = *masks, blocked, blocked
        sizes = case.heads, blocks, case.width, size, size
        self.sizes: tuple[int, ...] = *sizes, case.batch, case.length, case.length

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of transformers' block-sparse attention on the heads."""
        inputs = (x.contiguous() for x in (q, k, v))
        plan = {"seed": 0, "plan_from_length": None, "plan_num_rand_blocks": None}
        attend = self.core.bigbird_block_sparse_attention
        return attend(*inputs, *self.masks, *self.sizes, **plan)[0].transpose(1, 2)


def linformer(case: BenchmarkCase) -> Attention:
    """Return `linformer(k=K, max_length=N)`: all heads share E and F; no masks, pools or other sharing."""
    config = case.member.mechanism
    if not isinstance(config, LinformerConfig) or case.causal or case.member.position is not None:
        raise case.no_counterpart()
    if not isinstance(config.k, int) or config.sharing != "head" or config.projection != "linear":
        raise case.no_counterpart("it has one k, sharing 'head' and linear projections alone")
    return PublicLinformer(case, config, config.k)


class PublicLinformer(nn.Module):
    """`LinformerSelfAttention` with q, k and v instead of the outputs of its projections."""

    def __init__(self, case: BenchmarkCase, config: LinformerConfig, k: int):
        super().__init__()
        from linformer import LinformerSelfAttention

        layer = LinformerSelfAttention(case.heads * case.width, config.max_length, k=k, heads=case.heads)
        self.outputs = [FixedOutput() for _ in range(3)]
        for name, part in zip(("to_q", "to_k", "to_v", "to_out"), (*self.outputs, nn.Identity())):
            setattr(layer, name, part)
        self.layer = case.placed(layer)
        self.heads = case.heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of the package's layer with its projections replaced by the inputs."""
        for part, x in zip(self.outputs, (q, k, v)):
            part.value = x.transpose(1, 2).flatten(2)
        return self.layer(self.outputs[0].value).unflatten(2, (self.heads, -1)).transpose(1, 2)


def reformer_pytorch(case: BenchmarkCase) -> Attention:
    """Return `lsh`: chunks of `window` sorted tokens and the chunk before, with one bucket per chunk.

    Queries and keys are the same. By default it counts keys that several rounds attend to once per round,
    which is its faster form, and draws new hashes at every call.
    """
    config = case.member.mechanism
    if not isinstance(config, LSHConfig):
        raise case.no_counterpart("it has lsh")
    if case.length % (2 * config.window):
        raise case.no_counterpart(f"its length is a multiple of {2 * config.window}")
    from reformer_pytorch.reformer_pytorch import LSHAttention

    lsh = LSHAttention(bucket_size=config.window, n_hashes=config.rounds, causal=case.causal)
    attention = case.placed(lsh)
    return lambda q, k, v: attention(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v)


def routing_transformer(case: BenchmarkCase) -> Attention:
    """Return `routing(local_heads=0)`: a cluster takes a fixed number of tokens of the whole sequence, also
    from the future.

    Its queries attend to the tokens of their cluster, so that its window equals both sides of ours.
    """
    config = case.member.mechanism
    if not isinstance(config, RoutingConfig) or config.local_heads != 0:
        raise case.no_counterpart("it has routing(local_heads=0)")
    from routing_transformer.routing_transformer import KmeansAttention

    window = config.window if case.causal else 2 * config.window
    options = {"causal": case.causal, "ema_decay": config.decay, "shared_qk": config.share_queries}
    attention = case.placed(KmeansAttention(config.clusters, window, case.heads, case.width, **options))
    # The first call initializes the centroids with ten rounds of k-means.
    attention(*torch.randn(3, case.batch, case.heads, case.length, case.width, **case.place))
    return lambda q, k, v: attention(q, k, v)[0]


def flash_linear_attention(case: BenchmarkCase) -> Attention:
    """Return only the kernel of flash-linear-attention: gates are computed before, and no norm follows."""
    config = case.member.mechanism
    if not isinstance(config, RecurrenceConfig) or not case.causal:
        raise case.no_counterpart("it has recurrences in one direction")
    if torch.device(case.device).type != "cuda" or missing_package() is not None:
        raise AbsentError(missing_package() or "its kernels are for GPUs")
    shape = case.batch, case.heads, case.length
    place = {**case.place, "dtype": torch.float32}
    gates = {
        "linear": {},
        "delta": {"erase": 1},
        "gated_delta": {"decay": 1, "erase": 1},
        "kda": {"decay": case.width, "erase": 1},
        "gla": {"decay": case.width},
        "retention": {"decay": 1},
        "ssd": {"decay": 1},
    }.get(config.kind)
    if gates is None or getattr(config, "steps", 1) > 1:
        raise case.no_counterpart("its kernels here have one step of the delta rule for each token")
    tables = {name: torch.full((*shape, size), 0.5, **place) for name, size in gates.items()}
    if "decay" in tables:
        tables["decay"] = -tables["decay"]
    state = torch.zeros(*shape[:2], case.width, case.width, **place)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused_scan(ScanInputs(q, k, v, **tables), state, case.place["dtype"])[0].to(q.dtype)

    return run
