"""New text after a prompt, for every kind of tokenizer: with the prompt it is the text of all tokens."""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch

from polyformer import GenerationConfig, create_model
from polyformer.data.tokenizers.model_files import NORMAL, UNKNOWN, Pieces, pipeline
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig
from polyformer.models.generation import ContinuedText, TextStreamer
from polyformer.models.generation.results import CONTEXT

TEXTS = [f"The cat, {i} years old, sat on the mat. Crème brûlée €{i} for the dog! 👍🏽" for i in range(40)]
ALGORITHMS = "bytes", "characters", "bpe", "wordpiece", "unigram"
KINDS = *ALGORITHMS, "byte fallback"
BYTE = 6


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind != "byte fallback":
        options = {"algorithm": kind, "vocab_size": 300, "lowercase": kind == "wordpiece"}
        return Tokenizer.train(TokenizerConfig.from_dict(options), TEXTS)
    known = sorted({*"The cat sat on mat".replace(" ", "▁")})
    words = ["▁t", "▁c", "at", "▁cat", "▁m"]
    names = ["<unk>", *(f"<0x{number:02X}>" for number in range(256)), *known, *words]
    kinds = [UNKNOWN, *[BYTE] * 256, *[NORMAL] * (len(names) - 257)]
    scores = [0.0] * (len(names) - len(words)) + [-1.0 - i for i in range(len(words))]
    options = {"bytes_for_unknown": True, "tidy_spaces": False, "prefix": True}
    return Tokenizer(pipeline(Pieces(names, scores, kinds, is_bpe=True, characters=b"", **options)))


def streamed(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    pieces: list[str] = []
    streamer = TextStreamer(tokenizer.decode, write=pieces.append)
    streamer.begin([prompt])
    for number in new:
        streamer(torch.tensor([number]))
    streamer.finish()
    return "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_after_any_prompt(kind: str):
    tokenizer = tokenizer_of(kind)
    for text in TEXTS[:3]:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        for size in range(len(ids) + 1):
            # a character of several bytes at the end of the prompt belongs to the new text
            before = tokenizer.decode(ids[:size]).rstrip("\ufffd")
            assert before + ContinuedText(tokenizer.decode, ids[:size])(ids[size:]) == whole
            assert before + streamed(tokenizer, ids[:size], ids[size:]) == whole


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_the_text_of_random_tokens(kind: str):
    tokenizer, draw = tokenizer_of(kind), random.Random(0)
    for _ in range(30):
        ids = draw.choices(range(len(tokenizer)), k=24)
        size = draw.randrange(20)
        before = tokenizer.decode(ids[:size]).rstrip("\ufffd")
        new = ContinuedText(tokenizer.decode, ids[:size])(ids[size:])
        whole = tokenizer.decode(ids)
        assert new == whole[len(whole) - len(new) :]
        assert before == whole[: len(whole) - len(new)].rstrip("\ufffd")
        assert streamed(tokenizer, ids[:size], ids[size:]) == new


def test_bytes_that_later_bytes_change_are_held_back():
    """ByteFallback decodes neighbouring bytes together: one that is no character changes all before it."""
    tokenizer = tokenizer_of("byte fallback")
    ids = tokenizer.encode("é€")  # bytes of two characters
    for size in range(len(ids) + 1):
        assert streamed(tokenizer, [], ids[:size]) == tokenizer.decode(ids[:size])


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "byte fallback"])
def test_a_long_prompt_is_read_from_its_end(kind: str):
    tokenizer, read = tokenizer_of(kind), []

    def decode(ids) -> str:
        read.append(len(ids))
        return tokenizer.decode(ids)

    ids = tokenizer.encode("the cat sat on the mat " * 100)
    new = tokenizer.encode("cat")
    continued = ContinuedText(decode, ids)
    assert continued(new) == tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :] == " cat"
    assert max(read) <= CONTEXT + len(new)
    if tokenizer.special_ids:  # they have no text
        marks = [min(tokenizer.special_ids)] * 600
        assert ContinuedText(tokenizer.decode, ids + marks)(new) == " cat"


@pytest.fixture(scope="module")
def model() -> Callable[[str], torch.nn.Module]:
    @cache
    def make(kind: str) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            size = len(tokenizer_of(kind))
            return create_model(
                "decoder-tiny", vocab_size=size, position="rope", initializer_range=0.3
            ).eval()

    return make


SEARCHES = {
    "greedy": {},
    "samples": {"do_sample": True, "seed": 1, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.5},
    "lookup": {"draft": "lookup"},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_every_search_ends_at_a_stop_string_with_its_space(model, kind: str, search: str):
    """The first new word has its space, so a stop string that begins with it ends the text there."""
    tokenizer, options = tokenizer_of(kind), SEARCHES[search]
    prompts = ["the cat", "the dog on the mat for"]
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[5] * (width - len(row)) + row for row in rows])  # 5 is an ordinary token
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    run = {"decode": tokenizer.decode, "eos": (), "max_new_tokens": 9, **options}
    free = model(kind).generate(ids, mask, **run)
    copies = len(free.sequences) // 2
    texts = free.texts(tokenizer.decode)
    for number, (text, new) in enumerate(zip(texts, free.new_tokens())):
        row = rows[number // copies]
        assert tokenizer.decode(row) + text == tokenizer.decode([*row, *new])
    stop = texts[0][:3]
    stopped = model(kind).generate(ids, mask, config=GenerationConfig(stop=(stop,)), **run)
    for number, (new, text) in enumerate(zip(stopped.new_tokens(), stopped.texts(tokenizer.decode))):
        before = ContinuedText(tokenizer.decode, rows[number // copies])(new[:-1])
        assert stop not in before, "it ends with the token that completes the stop string"
        assert len(new) == 9 or stop in text
    if search in ("greedy", "contrastive", "lookup"):
        assert stopped.texts(tokenizer.decode, (stop,))[0] == ""


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_a_stream_is_the_text_of_the_result(model, kind: str):
    tokenizer, shown = tokenizer_of(kind), []
    ids = torch.tensor([tokenizer.encode("the cat sat on")])
    streamer = TextStreamer(tokenizer.decode, write=shown.append)
    generated = model(kind).generate(ids, max_new_tokens=12, eos=(), streamer=streamer)
    streamer.finish()
    assert "".join(shown) == generated.texts(tokenizer.decode)[0]
    assert tokenizer.decode(generated.sequences[0].tolist()) == "the cat sat on" + "".join(shown)
