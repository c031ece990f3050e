"""Answers by likelihood: the fast form is its definition, and prompts are told from answers."""

import math

import pytest
import torch

from polyformer import create_model
from polyformer.applications import prompting as module
from polyformer.applications.prompting import (
    Continuation,
    Example,
    Template,
    choose_answers,
    continuations,
    log_likelihoods,
    log_likelihoods_definition,
)
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer

OPTIONS = {
    "learned": {},
    "rope and a window": {"position": "rope", "attention": "Window(5)"},
    "alibi": {"position": "alibi"},
    "performer": {"attention": "performer"},
}


def tiny(**options: object) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 24}
    model = create_model("decoder-tiny", **sizes, initializer_range=0.8, **options)
    return model.double().eval()


def rows() -> list[Continuation]:
    """Six shared tokens; answers of one token behind one question, longer ones, equal ones, none shared."""
    shared = [1, 5, 3, 3, 8, 2]
    tails = [([4, 9], 6), ([4, 7], 6), ([4, 4, 6, 1, 5], 8), ([4, 9], 7), ([2, 2, 2], 6), ([4, 4, 6], 8)]
    return [Continuation([*shared, *tail], start) for tail, start in tails]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("batch_tokens", [1, 24, 4096])
def test_texts_with_a_common_beginning_score_as_by_themselves(name: str, batch_tokens: int):
    model = tiny(**OPTIONS[name])
    expected = log_likelihoods_definition(model, rows())
    assert log_likelihoods(model, rows(), batch_tokens) == pytest.approx(expected, rel=1e-10)
    alone = [Continuation([3, 5], 1), Continuation([4, 4, 6], 1)]
    assert log_likelihoods(model, alone) == pytest.approx(log_likelihoods_definition(model, alone), rel=1e-10)
    assert log_likelihoods(model, []) == []


def test_the_common_beginning_is_read_once(monkeypatch: pytest.MonkeyPatch):
    model, read = tiny(), list[tuple[int, ...]]()
    forward = model.forward

    def recording(input_ids: torch.Tensor, *args: object, **options: object) -> object:
        read.append(tuple(input_ids.shape))
        return forward(input_ids, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", recording)
    log_likelihoods(model, rows())
    # 5 tokens once; then what differs, without the last tokens: four texts of at most 5 tokens, as answers of
    # one token stand behind the same text.
    assert read == [(1, 5), (4, 5)]


def test_answers_begin_where_they_differ_from_the_prompt():
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    template, example = Template("{input}: {target}"), Example("ab", "yes", ("yes", "yellow"))
    several = continuations(tokenizer.encode, "x ", template, example)
    assert [tokenizer.decode(row.ids) for row in several] == ["x ab: yes", "x ab: yellow"]
    assert {row.start for row in several} == {len(tokenizer.encode("x ab:"))}
    with pytest.raises(InputError, match="template: no token precedes the answers to 'a'"):
        continuations(lambda text: [1], "", template, Example("a", None, ("b", "c")))


@pytest.mark.parametrize("normalize", ["none", "tokens", "bytes"])
def test_scores_are_divided_by_the_length_of_an_answer(
    normalize: module.Normalize, monkeypatch: pytest.MonkeyPatch
):
    several = [Continuation([1, 2, 3], 2), Continuation([1, 2, 3, 4, 5], 2)]
    monkeypatch.setattr(module, "log_likelihoods", lambda model, rows: [-1.0, -2.0][: len(rows)])
    questions = [Example("?", None, ("no", "ế"))]
    (scores,) = choose_answers(tiny(), [several], questions, normalize)
    sizes = {"none": (1, 1), "tokens": (1, 3), "bytes": (2, 3)}[normalize]
    assert scores == {"no": -1 / sizes[0], "ế": pytest.approx(-2 / sizes[1])}


def test_a_likely_text_is_chosen():
    model = tiny()
    with torch.no_grad():
        log_p = model(torch.tensor([[1, 5, 3]])).logits[0, -1].log_softmax(-1)
    scores = log_likelihoods(model, [Continuation([1, 5, 3, token], 3) for token in range(13)])
    assert scores == pytest.approx(log_p.tolist(), rel=1e-10)
    assert math.fsum(map(math.exp, scores)) == pytest.approx(1)
