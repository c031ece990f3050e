"""What is read from transformers' mask functions is what they say, entry by entry."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, masking_utils

import polyformer.models.transformers_attention  # noqa: F401  (it registers)
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.composition import MaskModPattern
from polyformer.attention.patterns.implied import Full, implied
from polyformer.models.attached.mask import Description, Mask, create_mask

CONFIG: Any = LlamaConfig(hidden_size=8, num_attention_heads=1)
CONFIG.sliding_window, CONFIG.attention_chunk_size = 4, 5
CONFIG._attn_implementation = "polyformer"
IMAGES = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1], [-1] * 9 + [0, 0, -1]])
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, :3], PADDED[1, -4:] = 0, 0
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
MAKERS = [
    "causal",
    "sliding_window_causal",
    "chunked_causal",
    "bidirectional",
    "bidirectional_sliding_window",
]


def whole_pattern(description: Description) -> Pattern:
    """What pattern and context say together."""
    limits = implied(description.context) or Full()
    return limits if description.pattern is None else limits & description.pattern


def entries(description: Description) -> Tensor:
    """The same for every pair, [B, 1, Tq, Tk]."""
    context, pattern = description.context, whole_pattern(description)
    places = torch.arange(2).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long)
    q_idx, kv_idx = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    mask = pattern.bind(True, q_idx.device).mask(context, *places, q_idx, kv_idx)
    return mask.expand(2, 1, context.q_len, context.kv_len)


def check(mask: Any, by_name: bool = True) -> Mask:
    """A mask says what its entries are, its layout misses nothing, and (`by_name`) no function is left."""
    assert isinstance(mask, Mask)
    description = mask.description
    dense = description.dense()
    assert torch.equal(entries(description), dense)
    for row in whole_pattern(description).bind(True, dense.device).layout(description.context, 5):
        inside = torch.zeros(description.kv_length, dtype=torch.bool)
        for start, stop in row.keys.some:
            inside[start:stop] = True
        assert not dense[:, :, row.start : row.stop, ~inside].any()
        for start, stop in row.keys.full:
            assert dense[:, :, row.start : row.stop, start:stop].all()
    assert by_name == (not isinstance(description.pattern, MaskModPattern))
    return mask


def positions(mask: Any) -> Tensor:
    """Those of the keys."""
    return mask.description.context.kv_pos


def maker(name: str) -> Callable[..., Any]:
    """`create_<name>_mask` for two rows of 12 tokens."""
    function = getattr(masking_utils, f"create_{name}_mask")
    options = {} if name.startswith("bi") else {"past_key_values": None}
    return lambda **more: function(
        CONFIG, torch.zeros(2, 12, 8), **{"attention_mask": None, **options, **more}
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_every_kind(name: str, padded: bool):
    check(maker(name)(attention_mask=PADDED if padded else None))


@pytest.mark.parametrize(
    ("name", "window"), [("sliding_window_causal", 1), ("bidirectional_sliding_window", 0)]
)
def test_windows_of_one_token(name: str, window: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CONFIG, "sliding_window", window)
    description = check(maker(name)()).description
    assert description.dense()[0, 0].tolist() == torch.eye(12).bool().tolist()


@pytest.mark.parametrize("name", MAKERS[:3])
def test_packed_sequences(name: str):
    mask = check(maker(name)(position_ids=POSITIONS))
    assert mask.description.context.q_doc is not None
    assert name == "chunked_causal" or torch.equal(positions(mask), POSITIONS)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("packed", [False, True])
def test_functions_of_a_model_stay_functions(name: str, packed: bool):
    """Image tokens that see each other, as Gemma 3 has them."""
    if packed and name.startswith("bi"):
        return
    images = masking_utils.blockwise_overlay(IMAGES)
    more = {"position_ids": POSITIONS} if packed else {"attention_mask": PADDED}
    check(maker(name)(or_mask_function=images, **more), by_name=False)
    even = lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0  # noqa: E731
    mask = maker(name)(and_mask_function=even, **more)
    assert torch.equal(entries(mask.description), mask.description.dense())


@pytest.mark.parametrize("function", ["causal", "sliding_window_causal", "chunked_causal"])
@pytest.mark.parametrize(
    ("seen", "first", "queries"), [(5, 0, 1), (5, 0, 3), (9, 6, 1), (9, 6, 3), (7, 4, 5)]
)
def test_caches(function: str, seen: int, first: int, queries: int):
    """Queries after `seen` tokens, of which a cache has kept those from `first` on."""
    padding = PADDED[:, :3].new_ones(2, seen + queries)
    padding[0, : seen - 2] = 0
    chunked = masking_utils.chunked_causal_mask_function(5, torch.tensor([seen - 2, 0]))
    functions = {
        "causal": masking_utils.causal_mask_function,
        "sliding_window_causal": masking_utils.sliding_window_causal_mask_function(4),
        "chunked_causal": chunked,
    }
    for mask, room in itertools.product((None, padding), (0, 4)):  # a static cache has empty slots
        length = seen - first + queries + room
        places = 2, queries, length, torch.tensor(seen), first
        function_mask = create_mask(*places, functions[function], attention_mask=mask)
        context = check(function_mask).description.context
        assert context.offset == seen - first
        if mask is not None and function == "causal":
            assert positions(function_mask)[0, context.offset] == 2, "positions count real tokens"
        elif first:
            assert function == "chunked_causal" or positions(function_mask).flatten()[0] == (
                first if mask is None else 0
            )


def test_a_mask_is_passed_on_as_a_tensor_is():
    mask = maker("sliding_window_causal")(attention_mask=PADDED)
    dense = mask.description.dense()
    assert (mask.shape, mask.dtype, mask.dim()) == (dense.shape, torch.bool, 4)
    with torch._C.DisableTorchFunctionSubclass():
        assert mask.untyped_storage().nbytes() == 1
    assert mask[:, :, :, :12] is mask
    assert mask.to("cpu") is mask
    assert mask.contiguous() is mask
    shorter = check(mask[:, :, :, :7])
    assert shorter.shape == (2, 1, 12, 7)
    for computed, expected in (
        (~mask, ~dense),
        (mask.float(), dense.float()),
        (mask[:, 0], dense[:, 0]),
        (mask[..., 2:], dense[..., 2:]),
        (mask & dense, dense),
        (torch.cat([mask, mask], 2), torch.cat([dense, dense], 2)),
        (torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0)),
        (mask.expand(2, 3, 12, 12), dense.expand(2, 3, 12, 12)),
    ):
        assert type(computed) is Tensor
        assert torch.equal(computed, expected)
