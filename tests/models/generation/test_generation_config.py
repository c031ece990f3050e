"""What may be asked of generation, and what is refused."""

import pytest

from polyformer import GenerationConfig, InputError
from polyformer.models.generation import BeamConfig, ConstraintConfig, SamplingConfig, WholeLengthConfig

TWO_BEAMS, SAMPLE = BeamConfig(num_beams=2), SamplingConfig(do_sample=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GenerationConfig(max_new_tokens=0), "max_new_tokens: expected 1 to 1048576, got 0"),
        (
            lambda: GenerationConfig(max_new_tokens=3, min_new_tokens=4),
            r"min_new_tokens: expected 0 to max_new_tokens \(3\), got 4",
        ),
        (lambda: GenerationConfig(min_new_tokens=-1), "min_new_tokens: expected 0"),
        (lambda: GenerationConfig(num_return_sequences=0), "num_return_sequences: expected 1 to 4096, got 0"),
        (
            lambda: GenerationConfig(num_return_sequences=2),
            "greedy search returns one text, got 2; sample or use beams",
        ),
        (
            lambda: GenerationConfig(num_return_sequences=3, beam=TWO_BEAMS),
            r"expected at most num_beams \(2\), got 3",
        ),
        (
            lambda: GenerationConfig(repetition_penalty=0.0),
            "repetition_penalty: expected a number above 0, got 0.0",
        ),
        (
            lambda: GenerationConfig(repetition_penalty=float("nan")),
            "repetition_penalty: expected a number above 0, got nan",
        ),
        (lambda: GenerationConfig(stop=("a", "")), "stop: expected texts of one character or more"),
        (
            lambda: GenerationConfig(sampling=SAMPLE, beam=TWO_BEAMS),
            "do_sample and num_beams: beam search does not sample",
        ),
        (
            lambda: SamplingConfig(do_sample=True, temperature=0.0),
            "temperature: expected a number above 0, got 0.0; .* leave do_sample out",
        ),
        (
            lambda: SamplingConfig(do_sample=True, top_k=0),
            "top_k: expected 1 or more, got 0; leave it out for no limit",
        ),
        (lambda: SamplingConfig(do_sample=True, top_p=1.5), r"top_p: expected a probability in \(0, 1\]"),
        (lambda: SamplingConfig(temperature=0.5), "temperature: only sampling uses it; set do_sample"),
        (lambda: SamplingConfig(top_k=5), "top_k: only sampling uses it"),
        (lambda: SamplingConfig(top_p=0.5), "top_p: only sampling uses it"),
        (lambda: SamplingConfig(seed=0), "seed: only sampling uses it"),
        (lambda: BeamConfig(num_beams=0), "num_beams: expected 1 to 4096, got 0"),
        (
            lambda: BeamConfig(num_beams=2, length_penalty=float("inf")),
            "length_penalty: expected a finite number, got inf",
        ),
        (
            lambda: BeamConfig(length_penalty=1.0),
            "length_penalty: only beam search uses it; set num_beams to 2 or more",
        ),
        (lambda: BeamConfig(early_stopping=True), "early_stopping: only beam search uses it"),
        (
            lambda: BeamConfig(num_beams=2, early_stopping="soon"),
            "early_stopping: expected bool, got 'soon'; or unknown early_stopping 'soon'",
        ),
        (
            lambda: BeamConfig(num_beams=2, normalization="sum"),
            "unknown normalization 'sum': expected one of 'gnmt', 'length'",
        ),
        (
            lambda: GenerationConfig(max_new_tokens=None),
            "max_new_tokens: expected a number, or None together",
        ),
        (
            lambda: WholeLengthConfig(max_length=0),
            "max_length: expected 1 or more, got 0; leave it out for no limit",
        ),
        (lambda: WholeLengthConfig(min_length=-1), "min_length: expected 0 or more, got -1"),
        (
            lambda: SamplingConfig(do_sample=True, typical_p=0.0),
            r"typical_p: expected a probability in \(0, 1\]",
        ),
        (
            lambda: ConstraintConfig(no_repeat_ngram_size=-1),
            "no_repeat_ngram_size: expected 0 or more, got -1",
        ),
        (
            lambda: ConstraintConfig(suppress_tokens=(-1,)),
            r"suppress_tokens\[0\]: expected 0 or more, got -1",
        ),
    ],
)
def test_contradictions_are_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_configuration_survives_files():
    config = GenerationConfig(
        max_new_tokens=7,
        stop=("\n", "END"),
        sampling=SamplingConfig(do_sample=True, top_p=0.9, seed=3),
        whole=WholeLengthConfig(max_length=9),
        constraints=ConstraintConfig(bad_words_ids=((1, 2), (3,))),
    )
    assert GenerationConfig.from_json(config.to_json()) == config
    assert GenerationConfig.from_yaml(config.to_yaml()) == config


def test_the_method_follows_from_the_options():
    assert GenerationConfig().method == "greedy"
    assert GenerationConfig(sampling=SAMPLE).method == "sample"
    assert GenerationConfig(beam=TWO_BEAMS).method == "beam"


def test_lengths_count_the_beginning_where_the_whole_text_is_limited():
    limits = WholeLengthConfig(max_length=9, min_length=6)
    assert GenerationConfig(max_new_tokens=None, whole=limits).lengths(4) == (2, 5)
    assert GenerationConfig(max_new_tokens=3, min_new_tokens=3, whole=limits).lengths(4) == (3, 3)
    assert GenerationConfig(max_new_tokens=8).lengths(100) == (0, 8)
