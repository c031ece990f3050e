"""Greedy search: with a cache as without, in a batch as alone, and where it stops."""

import copy
from collections.abc import Iterator

import pytest
import torch
from tiny_models import EOS, FAMILIES, PAD, VOCAB, decoder, left_padded, next_log_probabilities, pair, prompts

from polyformer import GenerationConfig, InputError, create_model
from polyformer.core.errors import Caution
from polyformer.models.architectures import Transformer
from polyformer.models.config import SpecialTokens
from polyformer.models.generation import decoder as decoder_module
from polyformer.models.generation.packed_weights import packed_copies
from product_choices import by


def plain_greedy(model: Transformer, prompt: torch.Tensor, steps: int) -> tuple[list[int], float]:
    """What greedy search should write, and its log-probability."""
    tokens: list[int] = []
    total = 0.0
    while len(tokens) < steps and EOS not in tokens:
        log_p = next_log_probabilities(model, prompt, tokens)
        tokens.append(int(log_p.argmax()))
        total += float(log_p.max())
    return tokens, total


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_is_uncached_token_for_token(family):
    lengths = set()
    for seed in range(5):
        model, prompt = FAMILIES[family](seed), prompts(1, 5, seed)
        got = model.generate(prompt, config=GenerationConfig(max_new_tokens=12))
        tokens, total = plain_greedy(model, prompt[0], 12)
        assert got.new_tokens() == [tokens]
        torch.testing.assert_close(float(got.scores[0]), total, rtol=1e-10, atol=1e-10)
        lengths.add(len(tokens))
    assert len(lengths) > 1, "some texts should end early, or the test says little"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_odd_lengths_is_its_rows_alone(family):
    model = FAMILIES[family](3)
    texts = [prompts(1, length, length)[0] for length in (1, 4, 7, 3, 6)]
    ids, mask = left_padded(texts)
    config = GenerationConfig(max_new_tokens=11, repetition_penalty=1.3)
    together = model.generate(ids, mask, config)
    alone = [model.generate(text.unsqueeze(0), config=config) for text in texts]
    assert together.new_tokens() == [single.new_tokens()[0] for single in alone]
    torch.testing.assert_close(
        together.scores, torch.cat([single.scores for single in alone]), rtol=1e-10, atol=1e-10
    )
    assert len(set(together.lengths.tolist())) > 1, "some rows should leave the batch before others"


def test_the_sequences_are_the_prompt_the_text_and_padding():
    model = decoder(3)
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (1, 4, 7, 3, 6)])
    got = model.generate(ids, mask, GenerationConfig(max_new_tokens=11))
    assert torch.equal(got.sequences[:, :7], ids)
    assert got.sequences.shape[1] == 7 + int(got.lengths.max())
    for row, length in zip(got.sequences[:, 7:], got.lengths.tolist()):
        assert (row[length:] == PAD).all()
        assert EOS not in row[: length - 1]


def test_without_a_pad_token_ended_texts_are_filled_with_the_end_token():
    model = decoder(3, SpecialTokens(eos=EOS))
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (1, 4, 7, 3, 6)])
    got = model.generate(ids, mask, GenerationConfig(max_new_tokens=11))
    filled = [row[length:] for row, length in zip(got.sequences[:, 7:], got.lengths.tolist())]
    assert any(len(rest) for rest in filled)
    assert all((rest == EOS).all() for rest in filled)


def test_an_encoder_decoder_returns_what_it_wrote_without_the_start():
    got = pair(1).generate(prompts(2, 5), config=GenerationConfig(max_new_tokens=4))
    assert got.prompt_length == 0
    assert got.sequences.shape == (2, int(got.lengths.max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_ends_before_min_new_tokens(family):
    for seed in range(5):
        model = FAMILIES[family](seed)
        got = model.generate(prompts(3, 5, seed), config=GenerationConfig(max_new_tokens=9, min_new_tokens=6))
        assert int(got.lengths.min()) >= 6
        assert all(EOS not in row[:6] for row in got.new_tokens())


def test_the_callback_sees_every_step_of_every_row():
    model, steps = decoder(3), []
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (1, 4, 7, 3, 6)])
    got = model.generate(
        ids, mask, GenerationConfig(max_new_tokens=11), streamer=lambda tokens: steps.append(tokens.clone())
    )
    assert torch.equal(torch.stack(steps, 1), got.sequences[:, 7:])


def test_the_source_is_encoded_and_projected_once(monkeypatch):
    model, calls = pair(2), {"encoder": 0, "key": 0}
    model.encoder.register_forward_hook(lambda *_: calls.__setitem__("encoder", calls["encoder"] + 1))
    projection = model.decoder.layers[0].cross_attention.key
    projection.register_forward_hook(lambda *_: calls.__setitem__("key", calls["key"] + 1))
    model.generate(prompts(2, 5), config=GenerationConfig(max_new_tokens=6, min_new_tokens=6))
    assert calls == {"encoder": 1, "key": 1}


def test_the_head_reads_one_position_a_step():
    model, rows = decoder(1), []
    model.head.register_forward_pre_hook(lambda head, inputs: rows.append(inputs[0].hidden.shape[1]))
    model.generate(prompts(2, 9), config=GenerationConfig(max_new_tokens=3, min_new_tokens=3))
    # The pass over the prompt has predictions of all positions, which are computed only if they are read.
    assert rows == [9, 1, 1, 1]


def test_the_cache_is_allocated_once():
    model, buffers = decoder(1), set()
    mechanism = model.decoder.layers[0].attention.mechanism
    mechanism.register_forward_hook(lambda module, inputs, output: buffers.add(output[1].keys.data_ptr()))
    model.generate(prompts(2, 9), config=GenerationConfig(max_new_tokens=30, min_new_tokens=30))
    assert len(buffers) == 1


def test_generation_reads_and_sets_no_global_random_state():
    model = decoder(2)
    before = torch.random.get_rng_state()
    model.generate(prompts(2, 5), config=GenerationConfig(max_new_tokens=8))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: decoder().generate(prompts(1, 30), config=GenerationConfig(max_new_tokens=11)),
            r"30 tokens of prompt and 11 new ones are more than the 40 learned positions .* at most 10",
        ),
        (
            lambda: decoder().generate(prompts(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]])),
            "attention_mask: a row ends in padding; pad on the left",
        ),
        (
            lambda: decoder().generate(prompts(2, 3), torch.ones(2, 4)),
            r"attention_mask: expected the shape of input_ids \(2, 3\), got \(2, 4\)",
        ),
        (lambda: decoder().generate(prompts(1, 3)[:, :0]), "expected .batch, length. with a token or more"),
        (
            lambda: decoder().generate(prompts(1, 3)[0]),
            r"expected .batch, length. with a token or more, got \(3,\)",
        ),
        (
            lambda: pair(special=SpecialTokens(eos=2)).generate(prompts(1, 3)),
            "special.bos: an encoder-decoder needs",
        ),
        (
            lambda: create_model("encoder-tiny").generate(prompts(1, 3)),
            "generate: needs a decoder with a language-model head",
        ),
        (
            lambda: decoder().generate(prompts(1, 3), config=GenerationConfig(max_new_tokens=5, stop=("a",))),
            "decode: stop strings require it",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_padding_does_not_count_against_the_positions():
    ids, mask = left_padded([prompts(1, 30)[0], prompts(1, 3)[0]])
    got = decoder().generate(ids, mask, GenerationConfig(max_new_tokens=10, min_new_tokens=10))
    assert got.sequences.shape == (2, 40)
    assert int(got.sequences.max()) < VOCAB


@pytest.fixture
def packable() -> Iterator[Transformer]:
    """A model whose matrices are large enough for oneDNN, and products by it, whatever is faster here."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create_model("decoder-tiny", hidden_size=160, vocab_size=500, initializer_range=0.3).eval()
    with by("onednn"):
        yield model


def test_packed_weights_write_the_same_text(packable, monkeypatch):
    model = packable
    together = model.generate(prompts(5, 6), max_new_tokens=30)
    kept = packed_copies(model).kept
    assert len(kept) == 7, "in each layer q, k and v as one, and the two of feed-forward; the vocabulary"
    again = model.generate(prompts(5, 6), max_new_tokens=30)
    assert torch.equal(together.scores, again.scores), "the first call and the next read the same copies"
    alone = torch.cat(
        [model.generate(row.unsqueeze(0), max_new_tokens=30).sequences for row in prompts(5, 6)]
    )
    assert torch.equal(together.sequences, alone)
    monkeypatch.setattr(decoder_module, "PACK_FOR_STEPS", 31)
    plain = model.generate(prompts(5, 6), max_new_tokens=30)
    assert torch.equal(together.sequences, plain.sequences)
    torch.testing.assert_close(together.scores, plain.scores)


def test_copies_of_weights_are_kept_in_evaluation_mode_and_never_read_once_changed(packable):
    model = packable
    with pytest.warns(Caution, match="training mode"):
        model.train().generate(prompts(2, 6), max_new_tokens=30)
    assert not packed_copies(model).kept
    model.eval().generate(prompts(2, 6), max_new_tokens=30)
    model.tokens.weight.data.mul_(-1)  # leaves no trace in the tensor's version
    changed = model.generate(prompts(2, 6), max_new_tokens=30)
    assert torch.equal(
        changed.sequences, copy.deepcopy(model).generate(prompts(2, 6), max_new_tokens=30).sequences
    )
