"""Flash attention's ends of packed sequences count the tokens of all rows, and are checked."""

from typing import Any

import pytest
import torch
from torch import Tensor
from twins import texts, twins

from polyformer import InputError

IDS = texts(2)[:, :12]
STACKS = {"decoder": ("gptj", "ForCausalLM"), "encoder": ("bert", "ForMaskedLM")}


def logits(kind: str, ids: Tensor, ends: list[int] | None = None, **arguments: Any) -> Tensor:
    ours, _ = twins(*STACKS[kind])
    if ends is not None:
        arguments["cu_seq_lens_q"] = torch.tensor(ends, dtype=torch.int32)
    return ours(input_ids=ids, **arguments).logits


@pytest.mark.parametrize("kind", STACKS)
def test_every_row_has_sequences_of_its_own(kind: str):
    packed = logits(kind, IDS, [0, 9, 12, 17, 24])
    texts_of_rows = [IDS[:1, :9], IDS[:1, 9:], IDS[1:, :5], IDS[1:, 5:]]
    single = torch.cat([logits(kind, text) for text in texts_of_rows], 1).view_as(packed)
    torch.testing.assert_close(packed, single)
    torch.testing.assert_close(logits(kind, IDS, [0, 12, 24]), logits(kind, IDS))


@pytest.mark.parametrize(
    "ends", [[3, 12], [0, 9, 5, 12], [0, 5, 99], [0, -1, 12], [0], [0, 5, 24], [0, 9, 24]], ids=str
)
@pytest.mark.parametrize("kind", STACKS)
def test_ends_that_do_not_divide_the_rows_are_refused(kind: str, ends: list[int]):
    with pytest.raises(InputError, match=r"^cu_seq_lens_q: expected "):
        logits(kind, IDS, ends)


def test_other_ends_of_keys_are_refused():
    keys = torch.tensor([0, 12, 20, 24])
    with pytest.raises(InputError, match=r"^cu_seq_lens_k: expected the numbers of cu_seq_lens_q"):
        logits("decoder", IDS, [0, 12, 17, 24], cu_seq_lens_k=keys)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
def test_an_encoder_decoder_packs_no_rows(name: str):
    ours, _ = twins("t5", "ForConditionalGeneration")
    with pytest.raises(InputError, match=f"^{name}: an encoder-decoder reads a single text per row"):
        ours(input_ids=IDS, decoder_input_ids=IDS, **{name: torch.tensor([0, 12, 24])})
