"""Stop strings and streamed text."""

import pytest
import torch
from tiny_models import decoder, prompts

from polyformer import GenerationConfig, InputError
from polyformer.models.generation import Generated, TextStreamer
from polyformer.models.generation.results import Stopping, cut

LETTERS = "abcdefghijklm"


def decode(ids) -> str:
    return "".join(LETTERS[number] for number in ids)


def test_a_row_ends_where_its_text_contains_a_stop_string():
    count = 0
    for seed in range(6):
        ids = prompts(3, 4, seed)
        free = decoder(seed).generate(ids, config=GenerationConfig(max_new_tokens=10)).texts(decode)
        stop = (free[0][2:4] or "b", free[1][1:3] or "c")
        got = decoder(seed).generate(
            ids, config=GenerationConfig(max_new_tokens=10, stop=stop), decode=decode
        )
        for before, after in zip(free, map(decode, got.new_tokens())):
            ends = [before.index(string) + len(string) for string in stop if string in before]
            assert after == before[: min(ends, default=len(before))]
            count += bool(ends)
    assert count >= 6


def test_a_stop_string_may_begin_inside_a_token_and_end_in_another():
    words = ["one ", "two ", "the end", "ing ", ". "]
    stopping = Stopping((), ("ending",), lambda ids: "".join(words[i] for i in ids))
    assert stopping.ended(torch.tensor([[0, 2], [2, 3], [2, 4]])).tolist() == [False, True, False]


def test_the_prompt_is_not_searched():
    ids = torch.tensor([[6, 7, 6, 7]])  # "ghgh"
    got = decoder(1).generate(
        ids, config=GenerationConfig(max_new_tokens=5, min_new_tokens=5, stop=("ghghgh",)), decode=decode
    )
    assert int(got.lengths) == 5


def test_texts_are_cut_at_the_first_stop_string():
    assert cut("one. two; three", (";", ".")) == "one"
    assert cut("one", ()) == "one"
    row = torch.tensor([[9, 0, 1, 2, 3, 0]])
    assert Generated(row, torch.tensor([4]), torch.zeros(1), 1).texts(decode, ("c",)) == ["ab"]


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> list[str]:
    """What a streamer shows after each token, the last entry after `finish`."""
    shown: list[str] = []
    streamer = TextStreamer(
        lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"), stop, shown.append
    )
    after = []
    for number in range(len(pieces)):
        streamer(torch.tensor([number]))
        after.append("".join(shown))
    streamer.finish()
    return [*after, "".join(shown)]


def test_streamed_text_waits_for_whole_characters():
    euro = "€".encode()
    assert stream([b"a", euro[:1], euro[1:], b"b"]) == ["a", "a", "a€", "a€b", "a€b"]


def test_streamed_text_holds_back_what_may_become_a_stop_string():
    assert stream([b"x", b"E", b"N", b"x", b"EN", b"D", b"y"], ("END",)) == [
        "x",
        "x",
        "x",
        "xENx",
        "xENx",
        "xENx",
        "xENx",
        "xENx",
    ]
    assert stream([b"aE", b"N"], ("END",)) == ["a", "a", "aEN"]


def test_streamed_text_is_the_text():
    shown: list[str] = []
    streamer = TextStreamer(decode, write=shown.append)
    got = decoder(2).generate(prompts(1, 4), config=GenerationConfig(max_new_tokens=8), streamer=streamer)
    streamer.finish()
    assert "".join(shown) == got.texts(decode)[0]
    assert len(shown) == int(got.lengths)


def test_a_text_streamer_shows_one_text():
    with pytest.raises(InputError, match="a TextStreamer shows one text, got a batch of 2"):
        TextStreamer(decode)(torch.tensor([1, 2]))
