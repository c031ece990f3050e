"""Probes of tiny models: scores of known answers, batches, models of transformers, and refused lengths."""

import json
import math
import random
from collections.abc import Sequence

import pytest
import torch

from polyformer import attach, create_model
from polyformer.applications.probing import (
    TASKS,
    ProbeConfig,
    ProbedModel,
    ProbeText,
    PromptFormat,
    fill,
    find_task,
    probe,
    prompts,
    score_table,
)
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig

SENTENCES = "The sun rises in the east. It sets in the west. Then it is night."
TEXT = ProbeText(SENTENCES.split() * 100)
SINGLE = "niah_single_1"


def byte_tokenizer() -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


def knowing(tokenizer: Tokenizer, wrong: int = 0) -> ProbedModel:
    """A model that reads the needles in its prompt, and fails for the first `wrong` prompts of a call."""

    def answer(rows: Sequence[list[int]], most: int) -> list[str]:
        texts = [tokenizer.decode(ids) for ids in rows]
        values = [text.split(" is: ")[1].split(".")[0] for text in texts]
        return ["I do not know."] * wrong + values[wrong:]

    return ProbedModel(tokenizer.encode_prompt, answer)


def tiny(tokenizer: Tokenizer, **options: object):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2}
    return create_model("decoder-tiny", vocab_size=len(tokenizer), **sizes, **options).eval()


def test_scores_and_their_errors():
    tokenizer = byte_tokenizer()
    config = ProbeConfig(samples=8)
    (result,) = probe(knowing(tokenizer, wrong=2), [SINGLE], [1500], TEXT, config)
    assert result.score == 0.75
    assert result.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 7))
    assert [answer.score for answer in result.answers] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert all(1400 - 128 < answer.tokens <= 1500 - 128 for answer in result.answers)
    record = json.loads(json.dumps(result.to_dict()))
    assert record["score"] == 0.75
    assert record["answers"][2]["text"] == record["answers"][2]["answers"][0]
    table = score_table([result, *probe(knowing(tokenizer), [SINGLE], [2000], TEXT, config)])
    assert table.splitlines() == ["tokens           1,500    2,000", "niah_single_1     75.0    100.0"]
    (alone,) = probe(knowing(tokenizer), [SINGLE], [1500], TEXT, ProbeConfig(samples=1))
    assert alone.to_dict()["standard_error"] is None


def test_more_samples_extend_the_same_prompts():
    model = knowing(byte_tokenizer())
    few, more = (prompts(SINGLE, 1500, model, TEXT, ProbeConfig(samples=n)) for n in (2, 4))
    assert more[:2] == few
    other = prompts(SINGLE, 1500, model, TEXT, ProbeConfig(samples=2, seed=1))
    assert [prompt.sample for prompt in other] != [prompt.sample for prompt in few]


def test_a_decoder_answers_in_batches_as_by_itself():
    tokenizer = byte_tokenizer()
    model = tiny(tokenizer, position="rope", attention="Window(64) | Global(2)")
    config = ProbeConfig(samples=3, max_new_tokens=8)
    results = [
        probe(ProbedModel.of(model, tokenizer, batch_tokens=most), [SINGLE, "vt"], [900], TEXT, config)
        for most in (1, 4096)
    ]
    assert results[0] == results[1]
    text = results[0][0].answers[0].text
    ids = prompts(SINGLE, 900, ProbedModel.of(model, tokenizer), TEXT, config)[0].ids
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8).texts(tokenizer.decode, ())[0]
    assert text == expected.strip()


@pytest.mark.parametrize("pattern", [None, "Window(64)"])
def test_models_of_transformers_attached_or_not(pattern: str | None):
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    if pattern is not None:
        attach(model, pattern)
    probed = ProbedModel.of(model, tokenizer)
    assert probed.longest is None
    (result,) = probe(probed, [SINGLE], [900], TEXT, ProbeConfig(samples=2, max_new_tokens=4))
    ids = torch.tensor([prompts(SINGLE, 900, probed, TEXT, ProbeConfig(samples=1))[0].ids])
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert result.answers[0].text == tokenizer.decode(expected.tolist())


def test_a_prompt_is_never_cut():
    tokenizer = byte_tokenizer()
    model = ProbedModel.of(tiny(tokenizer, max_position_embeddings=512), tokenizer)
    assert model.longest == 512
    with pytest.raises(
        InputError,
        match="lengths: expected at most 512 tokens, which the model takes, got 1024; use shorter lengths, "
        "or make a model for more by polyformer convert MODEL OUT --max-positions 1024",
    ):
        probe(model, [SINGLE], [256, 1024], TEXT, ProbeConfig(samples=1))
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **sizes))
    with pytest.raises(InputError, match="lengths: expected at most 128 tokens"):
        probe(ProbedModel.of(gpt2, tokenizer), [SINGLE], [1024], TEXT, ProbeConfig(samples=1))


def test_a_length_too_short_for_a_task_is_refused_before_anything_is_generated():
    def answer(rows: Sequence[list[int]], most: int) -> list[str]:
        raise AssertionError("generated")

    model = ProbedModel(byte_tokenizer().encode_prompt, answer)
    with pytest.raises(InputError, match=r"lengths: cwe: the shortest prompt has \d+ tokens"):
        probe(model, [SINGLE, "cwe"], [900], TEXT, ProbeConfig(samples=1))


def test_only_decoders_are_probed():
    tokenizer = byte_tokenizer()
    encoder = create_model("encoder-tiny", vocab_size=len(tokenizer))
    with pytest.raises(InputError, match="expected a decoder alone that predicts the next token"):
        ProbedModel.of(encoder, tokenizer)


def test_questions_with_long_paragraphs_are_skipped():
    short, long = "Rome is old.", "Oslo is cold. " * 200
    rows = [
        {"question": "Which is old?", "context": short, "answers": {"text": ["Rome"]}},
        {"question": "Which is cold?", "context": long, "answers": {"text": ["Oslo"]}},
    ]
    text = ProbeText(short.split(), rows, [short, long])
    task = find_task("qa", 700, text)
    for number in range(4):
        prompt = fill(task, byte_tokenizer().encode, 700, PromptFormat(), str(number))
        assert prompt.sample.answers == ("Rome",)
    assert task.sample(0, random.Random(0)).text.count("Document") == 1
    assert list(TASKS)[-1] == "qa"
