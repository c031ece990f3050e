"""Beam search against a page of plain code: no cache, no batch, no tensor of beams, no early exit."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from tiny_models import BOS, EOS, FAMILIES, VOCAB, decoder, left_padded, next_log_probabilities, pair, prompts

from polyformer import GenerationConfig, InputError
from polyformer.generation import BeamConfig
from polyformer.model import Transformer


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
        beams = [one for one in extended if one[1][-1] != EOS][:width]
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
    expected = [one for text in texts for one in reference(model, text, config)]
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
        for one in range(VOCAB):
            second = next_log_probabilities(model, prompt[0], [one])
            scores |= {(one, two): float(first[one] + second[two]) for two in range(VOCAB) if one != EOS}
        assert tuple(model.generate(prompt, config=config).new_tokens()[0]) == max(
            scores, key=lambda text: scores[text]
        )


def test_the_length_penalties_are_those_of_the_papers():
    gnmt = BeamConfig(num_beams=2, length_penalty=0.6)
    assert gnmt.divisor(1) == 1.0
    assert gnmt.divisor(7) == pytest.approx(2**0.6)
    by_length = BeamConfig(num_beams=2, normalization="length", length_penalty=2.0)
    assert by_length.divisor(7) == 49.0
    assert BeamConfig(num_beams=2, normalization="length", length_penalty=0.0).divisor(100) == 1.0


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
