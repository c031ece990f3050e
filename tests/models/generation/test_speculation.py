"""Speculative decoding: the same texts in fewer passes, samples of the same distribution."""

import dataclasses
import itertools

import pytest
import torch
from test_sampling import chi_square
from test_stopping import decode
from tiny_models import EOS, FAMILIES, VOCAB, decoder, left_padded, pair, prompts

from polyformer import GenerationConfig, InputError, create_model
from polyformer.core.state import State
from polyformer.models.generation import Drafts, TextStreamer
from polyformer.models.generation.decoder import DecodingStart
from polyformer.models.generation.results import Stopping
from polyformer.models.generation.search import SearchSettings, sampler, search
from polyformer.models.generation.speculation import Lookup, Speculator

SETTINGS = [
    {},
    {"repetition_penalty": 1.3, "min_new_tokens": 6},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8]], "eos_token_id": (3, EOS)},
    {"forced_eos_token_id": (EOS,), "suppress_tokens": (4,), "begin_suppress_tokens": (6,)},
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_the_same_in_a_batch_and_alone(family, settings):
    """By a model that agrees now and then, one that always agrees, and a look-up; rows end apart."""
    model, other = FAMILIES[family](3), FAMILIES[family](4)
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (1, 4, 7, 3)])
    settings = {"max_new_tokens": 12, **settings}
    plain = model.generate(ids, mask, **settings)
    for draft in (other, model, "lookup"):
        together = model.generate(ids, mask, draft=draft, draft_tokens=3, **settings)
        assert torch.equal(together.sequences, plain.sequences)
        assert torch.equal(together.lengths, plain.lengths)
        torch.testing.assert_close(together.scores, plain.scores, rtol=1e-10, atol=1e-10)
        alone = model.generate(ids[2:3], mask[2:3], draft=draft, **settings)
        assert alone.new_tokens() == plain.new_tokens()[2:3]


def test_a_draft_that_always_agrees_saves_its_passes():
    model = decoder(3)
    got = model.generate(prompts(2, 5), draft=model, draft_tokens=4, max_new_tokens=16, eos=())
    assert got.drafted is not None
    assert got.drafted.passes == 3, "after the prompt: 5 tokens a pass, of 15"
    assert got.drafted.accepted == got.drafted.proposed == 2 * 12
    assert model.generate(prompts(2, 5), max_new_tokens=3).drafted is None


@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_stop_strings_and_streamers_see_every_token(draft):
    model, ids, steps = decoder(2), prompts(1, 4), []
    free = model.generate(ids, max_new_tokens=14, eos=()).texts(decode)[0]
    stop = (free[6:8],)
    plain = model.generate(ids, max_new_tokens=14, eos=(), stop=stop, decode=decode)
    assert int(plain.lengths) < 14
    proposer = model if draft == "model" else draft
    settings = {"max_new_tokens": 14, "eos": (), "draft": proposer}
    got = model.generate(ids, stop=stop, decode=decode, **settings)
    assert torch.equal(got.sequences, plain.sequences)
    shown: list[str] = []
    streamer = TextStreamer(decode, write=shown.append)
    model.generate(ids, streamer=streamer, **settings)
    streamer.finish()
    assert "".join(shown) == free
    ids, mask = left_padded([prompts(1, length, length)[0] for length in (1, 4, 7)])
    got = model.generate(
        ids, mask, max_new_tokens=9, draft=proposer, streamer=lambda x: steps.append(x.clone())
    )
    assert torch.equal(torch.stack(steps, 1), got.sequences[:, got.prompt_length :])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_seed_are_the_same_with_a_lookup(family):
    accepted = 0
    for number in range(4):
        model, ids = FAMILIES[family](number), prompts(1 + number % 2, 6)
        settings = {"do_sample": True, "temperature": 0.5, "seed": 5, "max_new_tokens": 24, "eos": ()}
        plain = model.generate(ids, **settings)
        got = model.generate(ids, draft="lookup", **settings)
        assert torch.equal(got.sequences, plain.sequences)
        assert got.drafted is not None
        accepted += got.drafted.accepted
    assert accepted


def test_samples_with_a_model_are_repeated_by_their_seed():
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9, "draft": decoder(2)}
    first, second = (decoder(1).generate(prompts(2, 6), seed=5, **settings) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)


@dataclasses.dataclass(frozen=True)
class Nothing(State):
    """What a chain needs to go on."""

    def truncated_(self, count: int) -> "Nothing":
        """Itself."""
        return self


class Chain:
    """A model whose next token depends on the last alone, by `logits` [V, V]; as a drafter it draws."""

    max_new_tokens = 3

    def __init__(self, seed: int, size: int = 3):
        self.logits = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 1.5

    def start(self, input_ids, attention_mask, first, inputs):
        return DecodingStart(self.logits[input_ids[:, -1]], Nothing(), input_ids)

    def read(self, tokens, state, last):
        return self.logits[tokens[:, -last:]], state

    def probability(self, first: int, tokens: tuple[int, ...]) -> float:
        log_p = self.logits.double().log_softmax(-1)
        return float(sum(log_p[a, b] for a, b in itertools.pairwise((first, *tokens))).exp())


class ChainDrafter(Chain):
    """Draws its drafts from its own chain."""

    def __init__(self, seed: int, generator: torch.Generator):
        super().__init__(seed)
        self.generator = generator

    def start(self, input_ids, attention_mask, first, inputs):
        return Nothing()

    def propose(self, text, count, memory):
        width, probabilities = text.shape[1], []
        for _ in range(count):
            probabilities.append(self.logits[text[:, -1]].softmax(-1))
            token = torch.multinomial(probabilities[-1], 1, generator=self.generator)
            text = torch.cat([text, token], 1)
        return Drafts(text[:, width:], torch.stack(probabilities, 1) if count else None), memory


@pytest.mark.parametrize("rows", [1, 2])
def test_sampling_keeps_the_distribution_of_the_whole_text(rows):
    """All texts of three tokens, by enumeration; of two rows, which advance together, each on its own."""
    generator, model = torch.Generator().manual_seed(0), Chain(1)
    drafter, rules = ChainDrafter(2, generator), SearchSettings(3, 0, (), Stopping())
    texts, proposed, accepted = [], 0, 0
    for _ in range(2500):
        speculator = Speculator(model, drafter, 2, sampler(generator), generator)
        start = speculator.start(torch.zeros(rows, 1, dtype=torch.long), None, None, {})
        texts.append(search(speculator, start, rules, speculator.choose, 1).tokens)
        proposed, accepted = proposed + speculator.drafted.proposed, accepted + speculator.drafted.accepted
    outcomes = list(itertools.product(range(3), repeat=3))
    expected = torch.tensor([model.probability(0, tokens) for tokens in outcomes])
    proposals = torch.tensor([drafter.probability(0, tokens) for tokens in outcomes])
    for row in range(rows):
        numbers = torch.stack(texts)[:, row] @ torch.tensor([9, 3, 1])
        statistic, limit = chi_square(numbers, expected)
        assert statistic < limit
        assert chi_square(numbers, proposals)[0] > 3 * limit, "the test should tell them apart"
    assert 0.2 < accepted / proposed < 0.9


def test_a_draft_model_draws_from_what_shapes_the_text():
    """A draft of the same model is always accepted, whatever shapes its distribution."""
    model = decoder(1)
    settings = {"do_sample": True, "temperature": 1.7, "top_k": 5, "repetition_penalty": 1.4, "seed": 3}
    got = model.generate(prompts(2, 5), draft=model, max_new_tokens=16, eos=(), **settings)
    assert got.drafted is not None
    assert got.drafted.accepted == got.drafted.proposed > 0


def looked_up(rows: list[list[int]], count: int, before: list[list[int]] | None = None) -> list[list[int]]:
    lookup, text = Lookup(3, before is not None), torch.tensor(rows)
    memory = lookup.start(torch.tensor(before or rows), None, None, {})
    return lookup.propose(text, count, memory)[0].tokens.tolist()


def test_a_lookup_goes_on_as_the_text_did_before():
    assert looked_up([[1, 2, 3, 4, 5, 9, 2, 3, 4]], 2) == [[5, 9]]
    assert looked_up([[1, 2, 3, 8, 2, 3, 9, 2, 3]], 2) == [[9, 2]], "the last time counts"
    assert looked_up([[7, 1, 2, 5, 6, 3, 1, 2, 4, 6, 3, 1, 2]], 1) == [[4]]
    assert looked_up([[0, 1, 2, 9, 3, 1, 2, 7, 0, 1, 2]], 1) == [[9]], "a longer run counts more"
    assert looked_up([[4, 5, 6, 4, 5, 6]], 7) == [[4, 5, 6, 4, 5, 6, 4]], "and on, past the end"
    assert looked_up([[1, 2, 3, 4, 1]], 3) == [[]], "a single token says nothing"
    assert looked_up([[-1, -1, -1, -1]], 3) == [[]], "nor does padding"
    assert looked_up([[1, 2, 1, 2], [1, 2, 3, 4]], 3) == [[], []], "rows advance together"
    assert looked_up([[3, 1, 2]], 2, before=[[0, 1, 2, 8, -1]]) == [[8, 0]], (
        "in the source, whose padding is 0"
    )
    assert looked_up([[5]], 2) == [[]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "lookup", "num_beams": 2}, "draft: speculative decoding does not support beam search"),
        ({"draft": "look-up"}, "draft: expected a model, 'lookup', 'self' or a Drafter, got 'look-up'"),
        ({"draft_tokens": 3}, "draft_tokens and lookup_ngram: only a draft uses them"),
        ({"draft": "lookup", "draft_tokens": 0}, "draft_tokens: expected 1 or more, got 0"),
        ({"draft": "lookup", "lookup_ngram": 1}, "lookup_ngram: expected 2 or more, got 1"),
        ({"draft": pair()}, "draft: expected a decoder-only model, as the model is, got an encoder-decoder"),
        ({"draft": torch.nn.Linear(1, 1)}, "draft: expected a polyformer Transformer, got Linear"),
        ({"draft": create_model("encoder-tiny")}, "draft: needs a decoder with a language-model head"),
        (
            {"draft": create_model("decoder-tiny", vocab_size=VOCAB + 1)},
            f"same vocabulary of {VOCAB} tokens, got one of {VOCAB + 1}; use one with the same tokenizer",
        ),
        (
            {"draft": create_model("decoder-tiny", vocab_size=VOCAB, max_position_embeddings=9)},
            "draft: of the draft model, max_new_tokens: 4 tokens of prompt and 6 new ones are more than",
        ),
    ],
)
def test_what_cannot_draft_is_refused_by_name(settings, message):
    with pytest.raises(InputError, match=message):
        decoder().generate(prompts(1, 4), config=GenerationConfig(max_new_tokens=6), **settings)


def test_what_is_said_of_a_prompt_is_read_by_both_models():
    """Positions go on in the draft model too."""
    model, ids = decoder(3), prompts(2, 5)
    settings = {"position_ids": torch.arange(5).expand(2, -1) + 7, "max_new_tokens": 14, "eos": ()}
    plain = model.generate(ids, **settings)
    got = model.generate(ids, draft=model, **settings)
    assert torch.equal(got.sequences, plain.sequences)
    assert got.drafted is not None
    assert got.drafted.accepted == got.drafted.proposed
