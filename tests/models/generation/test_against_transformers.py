"""Token for token what transformers writes with the same weights: a decoder alone and an encoder-decoder."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers_twins import EOS, FAMILIES, LENGTH, PAD, VOCAB, prompts, texts
from transformers_twins import twins as pair

from pairwise import pairwise
from polyformer.models.architectures import Transformer
from polyformer.models.generation import Generated
from polyformer.models.generation.hub_format import from_hub
from tolerances import Double

STEPS = 9
EARLY = (True, False, "never")


@pytest.fixture(scope="module", params=FAMILIES)
def twins(request) -> tuple[Transformer, nn.Module]:
    pytest.importorskip("transformers")
    return pair(request.param)


def alternating(argument: str, values: Sequence[Any], first: int = 0) -> pytest.MarkDecorator:
    """Each value with one decoder alone and one encoder-decoder, in turn."""
    families = [("gpt2", "bart"), ("gptj", "t5")]
    cases = [(each, value) for i, value in enumerate(values) for each in families[(i + first) % 2]]
    return pytest.mark.parametrize(("twins", argument), cases, indirect=["twins"])


def both(
    twins: tuple[Transformer, nn.Module], rows: slice = slice(None), **options: Any
) -> tuple[Generated, torch.Tensor]:
    """What ours and theirs write for the same options, by the hub's names."""
    ours, theirs = twins
    ids, mask = (x[rows] for x in prompts(left=ours.encoder is None))
    options = {"max_new_tokens": STEPS, "pad_token_id": PAD, "eos_token_id": EOS, **options}
    got = ours.generate(ids, mask, from_hub(options))
    expected = theirs.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    return got, expected[:, LENGTH if ours.encoder is None else 1 :]


def assert_same(twins: tuple[Transformer, nn.Module], rows: slice = slice(None), **options: Any) -> Generated:
    got, expected = both(twins, rows, **options)
    eos = options.get("eos_token_id", EOS)
    eos = tuple(eos) if isinstance(eos, list) else (eos,)
    assert texts(got.sequences[:, got.prompt_length :], eos) == texts(expected, eos)
    return got


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [EOS], [3, 4], [11, 5], [9, 9, 9], [20, 24]]},
    "suppressed": {"suppress_tokens": [5, 9, 12], "begin_suppress_tokens": [EOS, 20, 21]},
    "several ends": {"eos_token_id": [EOS, 5, 6, 17]},
    "least new": {"min_new_tokens": 6},
    "least": {"max_new_tokens": None, "max_length": LENGTH + 5, "min_length": LENGTH + 3},
    "forced end": {"forced_eos_token_id": EOS},
    "forced ends": {"forced_eos_token_id": [EOS, 8]},
    "forced": {"forced_bos_token_id": 4, "begin_suppress_tokens": [EOS, 20, 21], "forced_eos_token_id": EOS},
    "all": {
        "forced_bos_token_id": 4,
        "forced_eos_token_id": EOS,
        "repetition_penalty": 1.2,
        "min_length": 5,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [3, 4]],
        "suppress_tokens": [9],
        "max_new_tokens": None,
        "max_length": LENGTH + 6,
    },
}


@alternating("name", [*CONSTRAINTS])
def test_greedy_texts_are_the_same(twins, name):
    assert_same(twins, **CONSTRAINTS[name])


@pytest.mark.parametrize(
    ("twins", "alpha", "early"), pairwise([*FAMILIES], [0.0, 0.6, 1.0, 2.0, -1.0], EARLY), indirect=["twins"]
)
def test_beams_are_the_same(twins, early, alpha):
    got = assert_same(twins, num_beams=4, num_return_sequences=2, early_stopping=early, length_penalty=alpha)
    assert alpha > 0.6 or int(got.lengths.min()) < STEPS, "some texts should end early"


@alternating("name", [name for name in CONSTRAINTS if name != "forced ends"], first=1)  # whose beams tie
def test_constrained_beams_are_the_same(twins, name):
    early = EARLY[list(CONSTRAINTS).index(name) % len(EARLY)]
    assert_same(twins, num_beams=3, num_return_sequences=3, early_stopping=early, **CONSTRAINTS[name])


def test_where_most_tokens_end_a_text_others_are_looked_for_among_more(twins):
    ends = [EOS, *range(6, VOCAB)]
    assert_same(
        twins,
        num_beams=3,
        num_return_sequences=3,
        early_stopping="never",
        length_penalty=3.0,
        eos_token_id=ends,
    )


@alternating("row", range(6))
def test_beams_of_one_text_are_the_same(twins, row):
    assert_same(twins, slice(row, row + 1), num_beams=5, num_return_sequences=5, max_new_tokens=14)


def test_the_scores_of_beams_are_the_same(twins, monkeypatch):
    """In float64 on both sides, where transformers computes scores and parts of its models in float32."""
    for module in ("generation.utils", "models.gptj.modeling_gptj", "models.t5.modeling_t5"):
        monkeypatch.setattr(f"transformers.{module}.torch", Double())
    ours, theirs = twins
    ids, mask = prompts(left=ours.encoder is None)
    options = {
        "max_new_tokens": STEPS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "num_beams": 4,
        "length_penalty": 1.3,
        "num_return_sequences": 4,
    }
    got = ours.generate(ids, mask, from_hub(options))
    expected = theirs.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options
    )
    torch.testing.assert_close(got.scores, expected.sequences_scores, rtol=1e-12, atol=1e-12)


def test_a_prompt_of_one_token_is_continued_by_the_forced_one():
    pytest.importorskip("transformers")
    ours, theirs = pair("gpt2")
    ids = torch.tensor([[5], [9]])
    options = {
        "max_new_tokens": 4,
        "forced_bos_token_id": 8,
        "begin_suppress_tokens": [EOS, 20],
        "pad_token_id": PAD,
        "eos_token_id": EOS,
    }
    got = ours.generate(ids, config=from_hub(options)).sequences
    assert got[:, 1].tolist() == [8, 8]
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    assert texts(got) == texts(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 0},
        {},
        {"top_k": 5, "top_p": 0.8},
        {"top_k": 0, "top_p": 0.3},
        {"top_k": 0, "min_p": 0.2},
        {"top_k": 0, "typical_p": 0.6},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8, "temperature": 1.7},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_same_distribution(options):
    """The logits that are left, by both, for the same logits and text."""
    transformers = pytest.importorskip("transformers")
    from polyformer.models.generation.processors import process, processors

    theirs = pair("gpt2")[1]
    hub = {"do_sample": True, "max_new_tokens": 5, "repetition_penalty": 1.3, "eos_token_id": EOS, **options}
    config = transformers.GenerationConfig(**{"top_k": 50, "max_length": 12, **hub})
    theirs._prepare_special_tokens(config)
    logits = 2 * torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0))
    history = torch.randint(3, VOCAB, (64, 8), generator=torch.Generator().manual_seed(1))
    expected = theirs._get_logits_processor(config, input_ids_seq_length=8)(history, logits)
    mine = processors(from_hub(hub), (EOS,), 8, torch.device("cpu"))
    torch.testing.assert_close(process(mine, logits, history).softmax(-1), expected.softmax(-1))
    assert (expected == -torch.inf).any() == (
        len(options) > 0 and options != {"temperature": 0.7, "top_k": 0}
    )
