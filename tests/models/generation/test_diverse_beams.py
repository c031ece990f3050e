"""Groups of beams against a page of plain code: no cache, no batch, no tensor of beams."""

import pytest
import torch
from tiny_models import EOS, FAMILIES, decoder, left_padded, next_log_probabilities, prompts
from torch import Tensor

from polyformer import GenerationConfig, InputError
from polyformer.models.architectures import Transformer
from polyformer.models.generation import BeamConfig
from polyformer.models.generation.hub_format import from_hub

Text = tuple[float, list[int]]


def reference(model: Transformer, prompt: Tensor, config: GenerationConfig) -> list[Text]:
    """The best texts with their scores, best first; groups stop at once (early_stopping) or at the end."""
    beam, last = config.beam, config.max_new_tokens
    assert last is not None
    size = beam.num_beams // beam.num_beam_groups
    groups: list[list[Text]] = [[(0.0, [])] for _ in range(beam.num_beam_groups)]
    finished: list[list[Text]] = [[] for _ in groups]
    for length in range(1, last + 1):
        taken: list[int] = []
        for number, beams in enumerate(groups):
            if beam.early_stopping is True and len(finished[number]) == size:
                continue
            extended = []
            for score, text in beams:
                for token, step in enumerate(next_log_probabilities(model, prompt, text).tolist()):
                    cost = beam.diversity_penalty * taken.count(token)
                    extended.append((score + step - cost, [*text, token]))
            extended.sort(reverse=True)
            ended = [text for text in extended[:size] if text[1][-1] == EOS or length == last]
            finished[number] += [(score / beam.divisor(length), text) for score, text in ended]
            finished[number] = sorted(finished[number], reverse=True)[:size]
            groups[number] = [text for text in extended if text[1][-1] != EOS][:size]
            taken += [text[-1] for _, text in groups[number]]
    return sorted((text for group in finished for text in group), reverse=True)[: config.num_return_sequences]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("beams", "groups", "early"), [(4, 2, True), (3, 3, True), (6, 2, True)])
def test_groups_are_the_reference(family: str, beams: int, groups: int, early: bool):
    model = FAMILIES[family](beams)
    config = GenerationConfig(
        max_new_tokens=6,
        num_return_sequences=beams,
        beam=BeamConfig(num_beams=beams, num_beam_groups=groups, diversity_penalty=0.7, early_stopping=early),
    )
    texts = [prompts(1, length, 3)[0] for length in (4, 1, 6)]
    actual = model.generate(*left_padded(texts), config)
    expected = [best for text in texts for best in reference(model, text, config)]
    assert actual.new_tokens() == [tokens for _, tokens in expected]
    scores = torch.tensor([score for score, _ in expected], dtype=actual.scores.dtype)
    torch.testing.assert_close(actual.scores, scores, rtol=1e-9, atol=1e-9)


def test_a_large_penalty_keeps_the_groups_apart():
    """By hand: with one beam a group, no two go on with one token at a step."""
    model = decoder(1)
    options = {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 1e3, "num_return_sequences": 3}
    texts = model.generate(prompts(2, 3), max_new_tokens=4, eos=(), early_stopping=True, **options)
    for own in torch.tensor(texts.new_tokens()).view(2, 3, 4):
        assert all(len(set(step.tolist())) == 3 for step in own.unbind(1))


def test_a_group_is_as_if_alone_and_never_changes_no_text():
    """The first group is a beam search of its own beams; stopping early for certain changes nothing."""
    model, ids = decoder(2), prompts(3, 4)
    small = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6}
    alone = model.generate(ids, **small)
    options = {"num_beam_groups": 2, "diversity_penalty": 5.0, "num_return_sequences": 4}
    both = model.generate(ids, **{**small, **options, "num_beams": 4}).new_tokens()
    for row, own in enumerate(zip(*[iter(alone.new_tokens())] * 2, strict=True)):
        assert all(text in both[4 * row : 4 * row + 4] for text in own)


def test_processors_and_stop_strings_hold():
    model = decoder(3)
    options = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
    texts = model.generate(prompts(2, 3), max_new_tokens=6, no_repeat_ngram_size=1, **options).sequences
    assert all(len(set(row)) == len(row) for row in ([t for t in row if t > EOS] for row in texts.tolist()))
    stopped = model.generate(
        prompts(1, 3),
        max_new_tokens=6,
        decode=lambda row: "".join(f"<{token}>" for token in row),
        stop=("<5>",),
        **options,
    )
    assert all(5 not in text[:-1] for text in stopped.new_tokens())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, "a divisor of the 4 beams"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups and diversity_penalty"),
        ({"num_beams": 4, "diversity_penalty": 1.0}, "num_beam_groups and diversity_penalty"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": -1.0},
            r"beam\.diversity_penalty: expected 0 or more, got -1\.0",
        ),
        ({"num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beam_groups: "),
    ],
)
def test_what_contradicts_is_refused_by_name(options: dict[str, float], message: str):
    with pytest.raises(InputError, match=message):
        decoder().generate(prompts(1, 2), max_new_tokens=4, **options)


def test_the_hub_names_them_so():
    data = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "length_penalty": 1.0}
    config = from_hub(data)
    assert (config.beam.num_beam_groups, config.beam.diversity_penalty) == (2, 0.5)
