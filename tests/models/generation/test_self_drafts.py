"""Drafts by the model itself: the same texts, and proposals as the parts define them."""

import itertools
from typing import Any

import pytest
import torch
from tiny_models import BOS, EOS, VOCAB, decoder, left_padded, prompts
from torch import Tensor

from polyformer import InputError, create_model
from polyformer.core.errors import Caution
from polyformer.core.sequence.context import Context
from polyformer.models.config import SpecialTokens
from polyformer.models.generation import self_drafts

KINDS = ["medusa(heads=3)", "multi_token", "multi_token(modules=3)"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"draft_tokens": 1},
    {"repetition_penalty": 1.3, "min_new_tokens": 6},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8]], "eos_token_id": (3, EOS)},
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
]


def model(drafting: str, seed: int = 0, preset: str = "decoder-tiny", **options: Any) -> Any:
    torch.manual_seed(seed)
    built: Any = create_model(
        preset,
        vocab_size=VOCAB,
        hidden_size=12,
        num_attention_heads=2,
        intermediate_size=24,
        initializer_range=0.8,
        dropout=0.0,
        special=SpecialTokens(pad=0, bos=BOS, eos=EOS),
        drafting=drafting,
        **options,
    )
    if drafting.startswith("medusa"):  # heads that agree with the head now and then
        built.start_drafting()
        torch.nn.init.normal_(built.drafting.residual, 0.0, 0.2)
    return built.double().eval()


def taught(own: Any, steps: int = 25) -> Any:
    """The model after a few steps on texts that count, so that many of its drafts are right."""
    optimizer = torch.optim.Adam([x for x in own.parameters() if x.requires_grad], lr=0.02)
    own.train()
    for step in range(steps):
        starts = torch.randint(10, (8, 1), generator=torch.Generator().manual_seed(step))
        ids = (starts + torch.arange(8)) % 10 + 3
        labels = {"decoder_input_ids": ids, "labels": ids.roll(-1, 1)} if own.encoder else {"labels": ids}
        optimizer.zero_grad()
        own(ids, **labels).loss.backward()
        optimizer.step()
    return own.eval()


def padded() -> tuple[Tensor, Tensor]:
    return left_padded([prompts(1, length, length)[0] for length in (1, 4, 7, 3)])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("drafting", KINDS)
def test_greedy_texts_are_the_same_in_a_batch_and_alone(drafting: str, settings: dict[str, Any]):
    (ids, mask), settings = padded(), {"max_new_tokens": 12, **settings}
    of_text = {name: value for name, value in settings.items() if name != "draft_tokens"}
    for seed, position in itertools.product(range(2), ("rope", "learned")):
        own = model(drafting, seed, position=position)
        plain = own.generate(ids, mask, **of_text)
        together = own.generate(ids, mask, draft="self", **settings)
        assert torch.equal(together.sequences, plain.sequences)
        assert torch.equal(together.lengths, plain.lengths)
        torch.testing.assert_close(together.scores, plain.scores, rtol=1e-10, atol=1e-10)
        alone = own.generate(ids[2:3], mask[2:3], draft="self", **settings)
        assert alone.new_tokens() == plain.new_tokens()[2:3]


OPTIONS: list[dict[str, Any]] = [
    {"attention": "Window(2)"},
    {"attention": "retention", "position": "none"},
    {"attention": "sigmoid", "position": "alibi"},
    {"position": "t5", "feedforward": "separable_convolution"},
    {"attention": "PerLayer([Window(2), Full()])", "position": "transformer_xl"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drafting", KINDS)
def test_mechanisms_positions_and_states_draft_too(drafting: str, options: dict[str, Any]):
    """Also a state of sums, which cannot forget the tokens that were read in vain."""
    own, (ids, mask) = model(drafting, **options), padded()
    plain, got = (own.generate(ids, mask, max_new_tokens=20, eos=(), draft=x) for x in (None, "self"))
    assert torch.equal(got.sequences, plain.sequences)
    ids = torch.arange(3, 10).view(1, -1)
    taught(own)
    plain, got = (own.generate(ids, max_new_tokens=20, eos=(), draft=x) for x in (None, "self"))
    assert torch.equal(got.sequences, plain.sequences)
    assert got.drafted.accepted, "drafts of a trained model"


def defined(own: Any, text: Tensor, count: int) -> list[int]:
    """The tokens [count] proposed after a text [W] without padding, computed from the whole text."""
    hidden = own(text[:-1].view(1, -1)).last_hidden_state
    if hasattr(own.drafting, "residual"):
        return own.drafting(hidden[:, -1:]).argmax(-1).flatten().tolist()[:count]
    follows, length = text.tolist(), len(text) - 1
    for ahead, part in enumerate(own.drafting.parts[:count], 1):
        vectors = own.tokens.weight[torch.tensor(follows[ahead:])].unsqueeze(0)
        x = part.joint(torch.cat([part.hidden_norm(hidden), part.token_norm(vectors)], -1))
        pos = torch.arange(length)
        x = part.stack.position.embed(x, pos, 0)
        hidden, _ = part.stack(x, pos, Context.of_lengths(length, length, True))
        follows.append(int(own.predictions(hidden[:, -1:]).argmax()))
    return follows[len(text) :]


@pytest.mark.parametrize("options", [{"position": "rope"}, {}, {"attention": "retention"}], ids=str)
@pytest.mark.parametrize("drafting", KINDS)
@torch.no_grad()
def test_proposals_are_those_of_the_whole_text(drafting: str, options: dict[str, Any], monkeypatch: Any):
    """Of each row alone, though rows are padded, advance together and leave when they end."""
    own, (ids, mask), seen = model(drafting, **options), padded(), 0
    drafter = self_drafts.DRAFTERS[type(own.drafting)]
    propose = drafter.propose

    def checked(self: Any, text: Tensor, count: int, memory: Any) -> Any:
        nonlocal seen
        drafts, memory = propose(self, text, count, memory)
        for row, tokens in zip(text, drafts.tokens):
            assert tokens.tolist() == defined(own, row[row >= 0], count)
            seen += 1
        return drafts, memory

    monkeypatch.setattr(drafter, "propose", checked)
    got = own.generate(ids, mask, max_new_tokens=16, draft="self", eos=(3, 5))
    assert len({*got.lengths.tolist()}) > 1, "rows should leave one after another"
    assert seen > 16
    seen = 0
    own.generate(ids, mask, max_new_tokens=10, draft="self", eos=(), do_sample=True, num_return_sequences=2)
    assert seen >= 8


def test_an_encoder_decoder_has_medusa_heads():
    own = taught(model("medusa", preset="transformer-tiny", block="pre"), steps=80)
    for ids, mask in (padded(), (torch.arange(3, 10).view(1, -1), None)):
        settings = {"max_new_tokens": 20, "eos": (), "start": 3}
        plain, got = (own.generate(ids, mask, draft=draft, **settings) for draft in (None, "self"))
        assert torch.equal(got.sequences, plain.sequences)
    assert got.drafted.accepted, "of a source that counts"


def test_a_model_that_repeats_itself_accepts_every_draft():
    """Of a head that always predicts the same token, all heads are right."""
    own = model("medusa(heads=4)", tied=False)
    with torch.no_grad():
        own.head.weight.zero_()
        own.start_drafting()
    got = own.generate(prompts(2, 5), max_new_tokens=16, draft="self", eos=())
    assert got.drafted is not None
    assert got.drafted.passes == 3, "after the prompt: 5 tokens a pass, of 15"
    assert got.drafted.accepted == got.drafted.proposed == 2 * 12


@pytest.mark.parametrize("drafting", KINDS)
def test_samples_of_a_seed_are_the_same(drafting: str):
    settings = {"do_sample": True, "temperature": 0.5, "seed": 5, "max_new_tokens": 24, "eos": ()}
    for seed in range(3):
        own = model(drafting, seed)
        plain = own.generate(prompts(2, 6), num_return_sequences=2, **settings)
        got = own.generate(prompts(2, 6), num_return_sequences=2, draft="self", **settings)
        assert torch.equal(got.sequences, plain.sequences)


def test_what_cannot_draft_by_itself_is_refused():
    with pytest.raises(InputError, match="draft: 'self' needs parts that predict further tokens"):
        decoder().generate(prompts(1, 4), draft="self", max_new_tokens=3)
    own = model("medusa")
    with pytest.raises(InputError, match="draft: speculative decoding does not support beam search"):
        own.generate(prompts(1, 4), draft="self", num_beams=2)
    own = model("multi_token", attention="selective")
    with (
        pytest.warns(Caution, match="'selective' keeps no cache"),
        pytest.raises(InputError, match="mechanism 'selective' cannot continue from a KV cache"),
    ):
        own.generate(prompts(1, 4), draft="self")
