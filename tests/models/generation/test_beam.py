"""Beam search against a page of plain code: no cache, no batch, no tensor of beams, no early exit."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import pytest
import torch
from tiny_models import BOS, EOS, FAMILIES, VOCAB, decoder, left_padded, next_log_probabilities, pair, prompts

from polyformer import GenerationConfig, InputError
from polyformer.models.architectures import Transformer
from polyformer.models.generation import BeamConfig
from polyformer.models.generation.beam_search import FinishedTexts, beam_search
from polyformer.models.generation.decoder import Decoder, DecodingStart
from polyformer.models.generation.results import Stopping
from polyformer.models.generation.search import SearchSettings


def reference(
    model: Transformer, prompt: torch.Tensor, config: GenerationConfig
) -> list[tuple[float, list[int]]]:
    """The best texts with their scores, best first."""
    width, last = config.beam.num_beams, config.max_new_tokens
    assert last is not None
    begun = prompt.tolist() if model.encoder is None else [BOS]
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, last + 1):
        extended = []
        for log_p, text in beams:
            steps = next_log_probabilities(model, prompt, text)
            if length <= config.min_new_tokens:
                steps[EOS] = -torch.inf
            for token in {*begun, *text}:
                steps[token] *= config.repetition_penalty
            extended += [(log_p + float(step), [*text, token]) for token, step in enumerate(steps)]
        extended.sort(reverse=True)
        for log_p, text in extended[:width]:
            if text[-1] == EOS or length == last:
                finished.append((log_p / divisor(config.beam, length), text))
        finished = sorted(finished, reverse=True)[:width]
        beams = [beam for beam in extended if beam[1][-1] != EOS][:width]
        full, early = len(finished) == width, config.beam.early_stopping
        if full and early is True:
            break
        if full and early is False and beams[0][0] / divisor(config.beam, length) <= finished[-1][0]:
            break
    return finished[: config.num_return_sequences]


def divisor(config: BeamConfig, length: int) -> float:
    """What log P is divided by."""
    base = {"gnmt": (5 + length) / 6, "length": length}[config.normalization]
    return base**config.length_penalty


def assert_is_reference(model: Transformer, texts: list[torch.Tensor], config: GenerationConfig) -> None:
    ids, mask = left_padded(texts)
    got = model.generate(ids, mask, config)
    expected = [best for text in texts for best in reference(model, text, config)]
    assert got.new_tokens() == [tokens for _, tokens in expected]
    scores = torch.tensor([score for score, _ in expected], dtype=got.scores.dtype)
    torch.testing.assert_close(got.scores, scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_beams_are_the_reference(family, seed):
    config = GenerationConfig(max_new_tokens=7, num_return_sequences=3, beam=BeamConfig(num_beams=4))
    assert_is_reference(FAMILIES[family](seed), [prompts(1, length, seed)[0] for length in (4, 1, 6)], config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "config",
    [
        GenerationConfig(max_new_tokens=7, beam=BeamConfig(num_beams=2, length_penalty=0.0)),
        GenerationConfig(max_new_tokens=7, beam=BeamConfig(num_beams=3, length_penalty=2.0)),
        GenerationConfig(max_new_tokens=7, beam=BeamConfig(num_beams=3, length_penalty=-1.0)),
        GenerationConfig(
            max_new_tokens=7, beam=BeamConfig(num_beams=4, early_stopping=True), num_return_sequences=4
        ),
        GenerationConfig(max_new_tokens=7, beam=BeamConfig(num_beams=6), num_return_sequences=6),
        GenerationConfig(max_new_tokens=1, beam=BeamConfig(num_beams=4), num_return_sequences=4),
        GenerationConfig(
            max_new_tokens=7,
            beam=BeamConfig(num_beams=3, length_penalty=2.0, early_stopping=False),
            num_return_sequences=3,
        ),
        GenerationConfig(
            max_new_tokens=7,
            beam=BeamConfig(num_beams=3, normalization="length", length_penalty=1.5),
            num_return_sequences=2,
        ),
        GenerationConfig(max_new_tokens=7, min_new_tokens=4, beam=BeamConfig(num_beams=4)),
        GenerationConfig(max_new_tokens=7, repetition_penalty=1.4, beam=BeamConfig(num_beams=4)),
    ],
    ids=[
        "sum",
        "long",
        "short",
        "early",
        "heuristic",
        "by length",
        "wide",
        "one token",
        "minimum",
        "repetition",
    ],
)
def test_every_option_is_the_reference(family, config):
    for seed in range(2):
        assert_is_reference(
            FAMILIES[family](seed), [prompts(1, length, seed)[0] for length in (2, 5)], config
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_that_are_settled_leave_the_others_as_they_were(family):
    beam = BeamConfig(num_beams=2, early_stopping=True)
    config = GenerationConfig(max_new_tokens=8, repetition_penalty=1.3, beam=beam)
    for seed in (2, 3, 4):
        texts = [prompts(1, length, length)[0] for length in (4, 1, 6, 2, 5)]
        assert_is_reference(FAMILIES[family](seed), texts, config)


def test_beams_as_wide_as_the_vocabulary_find_the_best_of_all_short_texts():
    config = GenerationConfig(max_new_tokens=2, beam=BeamConfig(num_beams=VOCAB - 1, length_penalty=0.0))
    for seed in range(5):
        model, prompt = decoder(seed), prompts(1, 4, seed)
        first = next_log_probabilities(model, prompt[0], [])
        scores = {(EOS,): float(first[EOS])}
        for token in range(VOCAB):
            second = next_log_probabilities(model, prompt[0], [token])
            scores |= {
                (token, last): float(first[token] + second[last]) for last in range(VOCAB) if token != EOS
            }
        assert tuple(model.generate(prompt, config=config).new_tokens()[0]) == max(
            scores, key=lambda text: scores[text]
        )


def test_the_divisors_are_those_of_the_papers():
    gnmt = BeamConfig(num_beams=2, length_penalty=0.6)
    assert gnmt.divisor(1) == 1.0
    assert gnmt.divisor(7) == pytest.approx(2**0.6)
    by_length = BeamConfig(num_beams=2, normalization="length", length_penalty=2.0)
    assert by_length.divisor(7) == 49.0
    assert BeamConfig(num_beams=2, normalization="length", length_penalty=0.0).divisor(100) == 1.0


A, B, END = 0, 1, 2


class Scripted(Decoder):
    """Probabilities of the next token (A, B, the end) after a beginning; the state is the beginnings."""

    def __init__(self, script: dict[str, tuple[float, float, float]]):
        self.script = script

    def logits(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([self.script[text] for text in texts], dtype=torch.float64).log()

    def step(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        texts = [text + "AB."[token] for text, token in zip(state.texts, tokens.tolist())]
        return self.logits(texts), Texts(texts)


class Texts:
    def __init__(self, texts: list[str]):
        self.texts = texts

    def reorder(self, index: torch.Tensor) -> "Texts":
        return Texts([self.texts[row] for row in index.tolist()])

    reorder_beams = reorder


@pytest.mark.parametrize("normalization", ["length", "gnmt"])
@pytest.mark.parametrize(
    ("length_penalty", "best"),
    [
        # The sum of the logarithms alone: "." has log 0.45 = -0.799, "A." log 0.5005 = -0.692.
        (0.0, [A, END]),
        # Short texts win: "A." has 2 * -0.692 = -1.384 by length and 7/6 * -0.692 = -0.808 by GNMT.
        (-1.0, [END]),
    ],
)
def test_the_best_text_by_hand(
    normalization: Literal["length", "gnmt"], length_penalty: float, best: list[int]
):
    script = {"": (0.55, 1e-9, 0.45), "A": (0.045, 0.045, 0.91), "B": (0.1, 0.1, 0.8)}
    assert winner(script, normalization, length_penalty, max_length=2)[0] == best


@pytest.mark.parametrize(("normalization", "divisors"), [("length", (1, 0.5)), ("gnmt", (1, 6 / 7))])
def test_with_a_negative_length_penalty_the_next_length_is_the_kindest(
    normalization: Literal["length", "gnmt"], divisors: tuple[float, float]
):
    """With ^-1 the divisor falls with the length: 1, 1/2, ... 1/6 by length and 1, 6/7, ... 6/11 by GNMT.

    After one token "." has ended with log 0.3 = -1.204 and "A" goes on with log 0.68 = -0.386. Whatever ends
    next scores at most -0.386 / divisor(2), which is -0.771 or -0.450 and beats -1.204: the search goes on.
    At the last length, 6, it would be -2.314 or -0.707.
    """
    script = {"": (0.68, 0.02, 0.3), "A": (1e-9, 1e-9, 1.0), "B": (1e-9, 1e-9, 1.0)}
    text, score = winner(script, normalization, -1.0, max_length=6)
    assert text == [A, END]
    assert score == pytest.approx(math.log(0.68) / divisors[1], abs=1e-6)
    assert score > math.log(0.3) / divisors[0]


@pytest.mark.parametrize("normalization", ["length", "gnmt"])
def test_a_positive_length_penalty_waits_for_the_longest_text(normalization: Literal["length", "gnmt"]):
    """With ^1 the divisor at 4 tokens is 4 or 3/2: log 0.6 / 4 = -0.128 and log 0.6 / 1.5 = -0.341 beat what
    ended after one token, log 0.4 = -0.916, although every score before was worse than log 0.4."""
    nearly = (1 - 2e-9, 1e-9, 1e-9)
    script = {"": (0.6, 1e-9, 0.4), "A": nearly, "AA": nearly, "AAA": (1e-9, 1e-9, 1.0)}
    script |= dict.fromkeys(("B", "AB", "AAB", "BA", "BB", "ABA", "ABB", "BAA", "BAB"), (1e-09, 1e-09, 1.0))
    text, score = winner(script, normalization, 1.0, max_length=4)
    assert text == [A, A, A, END]
    assert score == pytest.approx(math.log(0.6) / {"length": 4, "gnmt": 1.5}[normalization], abs=1e-6)


@pytest.mark.parametrize(
    ("normalization", "length_penalty", "log_p", "settled"),
    [
        # The best ended text has 2 tokens and log P -1.0; a beam of 2 tokens may end with 3 to 8.
        ("length", -1.0, -0.6, False),  # ended -1.0 * 2 = -2.0; at best -0.6 * 3 = -1.8 (at 8: -4.8)
        ("length", -1.0, -0.7, True),  # at best -0.7 * 3 = -2.1
        ("length", 1.0, -3.9, False),  # ended -1.0 / 2 = -0.5; at best -3.9 / 8 = -0.4875 (at 3: -1.3)
        ("length", 1.0, -4.1, True),  # at best -4.1 / 8 = -0.5125
        ("gnmt", -1.0, -0.87, False),  # ended -7/6 = -1.1667; at best -0.87 * 8/6 = -1.16 (at 8: -1.885)
        ("gnmt", -1.0, -0.88, True),  # at best -0.88 * 8/6 = -1.1733
        ("gnmt", 1.0, -1.85, False),  # ended -6/7 = -0.8571; at best -1.85 * 6/13 = -0.8538
        ("gnmt", 1.0, -1.86, True),  # at best -1.86 * 6/13 = -0.8585
        ("length", 0.0, -0.99, False),
        ("length", 0.0, -1.0, True),
    ],
)
def test_never_stops_when_no_text_to_come_can_win(
    normalization: Literal["length", "gnmt"], length_penalty: float, log_p: float, settled: bool
):
    config = BeamConfig(num_beams=2, normalization=normalization, length_penalty=length_penalty)
    finished = FinishedTexts(config, wanted=1, max_length=8)
    finished.add(-1.0, torch.tensor([A, END]))
    assert finished.is_done(log_p, length=2) is settled


def winner(
    script: dict[str, tuple[float, float, float]],
    normalization: Literal["length", "gnmt"],
    length_penalty: float,
    max_length: int,
) -> tuple[list[int], float]:
    """The best text of two beams, and its score."""
    decoder = Scripted(script)
    start = DecodingStart(decoder.logits([""]), cast(Any, Texts([""])), torch.zeros(1, 1, dtype=torch.long))
    config = BeamConfig(num_beams=2, normalization=normalization, length_penalty=length_penalty)
    result = beam_search(decoder, start, SearchSettings(max_length, END, (), Stopping((END,))), config, 1)
    return result.tokens[0, : int(result.lengths)].tolist(), float(result.scores)


def test_a_stop_string_ends_a_beam():
    def decode(ids: Sequence[int]) -> str:
        return "".join("abcdefghijklm"[number] for number in ids)

    ended = 0
    for seed in range(4):
        model, ids = decoder(seed), prompts(1, 4, seed)
        config = GenerationConfig(max_new_tokens=8, num_return_sequences=3, beam=BeamConfig(num_beams=3))
        stop = model.generate(ids, config=config).texts(decode)[0][1:3] or "b"
        config = dataclasses.replace(config, stop=(stop,))
        for text in map(decode, model.generate(ids, config=config, decode=decode).new_tokens()):
            assert stop not in text[:-1]
            ended += text.endswith(stop)
    assert ended, "some text should end at the stop string, or the test says little"


def test_only_what_a_step_moves_is_reordered(monkeypatch):
    model = pair(0)
    sources = set()
    attention = model.decoder.layers[0].cross_attention.mechanism
    attention.register_forward_hook(lambda module, inputs, output: sources.add(inputs[1].data_ptr()))
    config = GenerationConfig(max_new_tokens=6, min_new_tokens=6, beam=BeamConfig(num_beams=3))
    model.generate(prompts(2, 5), config=config)
    assert len(sources) == 2, "the projected source: of the first step, and spread over the beams once"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"config": GenerationConfig(max_new_tokens=5, beam=BeamConfig(num_beams=13))},
            "num_beams: expected fewer than the 13 tokens, got 13",
        ),
        (
            {"config": GenerationConfig(max_new_tokens=5, beam=BeamConfig(num_beams=2)), "streamer": print},
            "streamer: beam search knows its text only at the end",
        ),
    ],
)
def test_what_beam_search_cannot_do_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        decoder().generate(prompts(1, 3), **options)
