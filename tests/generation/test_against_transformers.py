"""Token for token what transformers' GPT-2 writes with the same weights."""

import pytest
import torch

from polyformer import GenerationConfig, create_model
from polyformer.bench.generation import transformers_twin
from polyformer.generation import BeamConfig
from polyformer.model import SpecialTokens, Transformer

VOCAB, EOS, STEPS = 31, 2, 9


@pytest.fixture(scope="module")
def twins() -> tuple[Transformer, torch.nn.Module]:
    pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        ours = create_model(
            "gpt2", num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=40,
            vocab_size=VOCAB, max_position_embeddings=32, initializer_range=0.6,
            special=SpecialTokens(pad=0, eos=EOS),
        )  # fmt: skip
    return ours.double().eval(), transformers_twin(ours).double().eval()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (6, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 0, 5, 1, 0)):
        mask[row, :padding] = 0
    return ids, mask


def texts(tokens: torch.Tensor) -> list[list[int]]:
    """What was written up to its end, whatever fills the row after it."""
    rows = tokens[:, 7:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@torch.no_grad()
def test_logits_are_the_same(twins):
    ours, theirs = twins
    ids = prompts()[0]
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_texts_are_the_same(twins, penalty):
    ours, theirs = twins
    ids, mask = prompts()
    ids[mask == 0] = ids[:, -1:].expand_as(ids)[mask == 0]  # theirs would also penalise the padding
    config = GenerationConfig(max_new_tokens=STEPS, repetition_penalty=penalty)
    got = ours.generate(ids, mask, config).sequences
    expected = theirs.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=STEPS, repetition_penalty=penalty,
        pad_token_id=0, eos_token_id=EOS,
    )  # fmt: skip
    assert texts(got) == texts(expected)


@pytest.mark.parametrize("early", [False, True])
def test_beams_are_the_same(twins, early):
    ours, theirs = twins
    ids, mask = prompts()
    beam = BeamConfig(
        num_beams=4, length_penalty=0.0, early_stopping=early
    )  # theirs divides by a power of |Y|
    got = ours.generate(ids, mask, GenerationConfig(max_new_tokens=STEPS, num_return_sequences=2, beam=beam))
    expected = theirs.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=STEPS, num_beams=4, num_return_sequences=2,
        length_penalty=0.0, early_stopping=early, pad_token_id=0, eos_token_id=EOS,
    )  # fmt: skip
    assert texts(got.sequences) == texts(expected)
    assert int(got.lengths.min()) < STEPS, "some texts should end early"
