"""Which backend `auto` picks, and that it says why not the others."""

import torch
from torch import Tensor

from polyformer.attention.functional.attend import explain
from polyformer.attention.patterns import Causal, Global, Window
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context


def empty(
    batch: int, queries: int, keys: int, *, width: int = 8, v_width: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a shape, on the meta device: choosing computes nothing."""
    make = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    return make(batch, 2, queries, width), make(batch, 2, keys, width), make(batch, 2, keys, v_width)


def test_dense_and_causal_go_to_sdpa() -> None:
    for pattern in (None, Causal()):
        choice = explain(*empty(1, 65536, 65536), pattern=pattern)
        assert str(choice) == "sdpa (first choice)"


def test_decoding_goes_to_sdpa_with_a_cache_and_padding() -> None:
    for queries in (1, 3):
        context = Context(queries, 30000, causal=True, kv_valid=torch.ones(4, 30000, dtype=torch.bool))
        assert explain(*empty(4, queries, 30000), context=context).backend == "sdpa"
    assert explain(*empty(4, 1, 30000), context=Context(1, 30000, causal=True)).backend == "sdpa"


def test_small_sparse_inputs_go_to_sdpa_and_large_ones_to_tiles() -> None:
    assert explain(*empty(1, 100, 100), pattern=Window(5)).backend == "sdpa"
    choice = explain(*empty(1, 1024, 1024), pattern=Window(16) | Global(1))
    assert choice.backend == "tiled"
    assert choice.reasons["sdpa"].startswith("it would compute every pair and the pattern needs ")
    assert choice.reasons["flex"] == "its kernels are for CUDA and CPUs, not meta"
    assert explain(*empty(1, 1024, 1024), pattern=Window(900)).backend == "sdpa", "nearly dense"


def test_decoding_in_a_window_does_not_read_a_long_cache() -> None:
    context = Context(1, 200_000, causal=True)
    assert explain(*empty(4, 1, 200_000), pattern=Window(100, 0), context=context).backend == "tiled"
    assert (
        explain(*empty(4, 1, 200), pattern=Window(100, 0), context=Context(1, 200, causal=True)).backend
        == "sdpa"
    )


def test_long_masks_are_not_built() -> None:
    context = Context(8192, 8192, causal=True, kv_valid=torch.ones(1, 8192, dtype=torch.bool))
    choice = explain(*empty(1, 8192, 8192), context=context)
    assert choice.backend == "tiled"
    assert choice.reasons["sdpa"] == "its mask would have more than 4194304 entries"


def test_what_torch_would_compute_densely_goes_to_tiles() -> None:
    q, k, v = empty(1, 8192, 8192, v_width=9)
    assert explain(q, k, v).reasons["sdpa"].startswith("torch has no fused kernel for this width")
    q, k, v = (torch.empty(1, 2, 8192, 1).expand(1, 2, 8192, 8) for _ in range(3))
    assert explain(q, k, v).backend == "sdpa"
    choice = explain(q, k, v, dropout=0.1)
    assert choice.backend == "tiled"
    assert choice.reasons["sdpa"].startswith("torch has no fused kernel for dropout here")


def test_score_mods_and_log_sum_exps_go_to_tiles() -> None:
    q, k, v = empty(1, 10, 10)
    choice = explain(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score)
    assert str(choice).startswith(
        "tiled (not sdpa: a score_mod or relative terms change the scores; not flex: "
    )
    assert explain(q, k, v, return_lse=True).backend == "tiled"


def test_while_recording_everything_is_dense() -> None:
    q, k, v = empty(1, 10, 10)
    with recorded():
        choice = explain(q, k, v)
    assert choice.backend == "definition"
    assert choice.reasons["sdpa"] == "attention weights are being recorded"
