"""Generation with a mechanism that keeps no cache: the texts of the same model with a cache."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import BOS, FAMILIES, left_padded, prompts

from polyformer import InputError, create_model
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.errors import Caution
from polyformer.models.architectures import Transformer
from polyformer.models.generation.prefill import warn_of_recomputing


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    """A softmax that declares no cache; its warning has its own test."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ForgetfulConfig(SoftmaxConfig):
        kind: ClassVar[str] = "forgetful"
        supports_kv_cache: ClassVar[bool] = False

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "generate: mechanism 'forgetful'")
        yield
    warn_of_recomputing.cache_clear()
    del MechanismConfig.kinds["forgetful"]


def twins(family: str, **options: Any) -> tuple[Transformer, Transformer]:
    """A model with a cache, and the same weights without."""
    cached = FAMILIES[family]()
    side = cached.config.decoder
    attention = dataclasses.replace(side.attention, mechanism=MechanismConfig.from_dict("forgetful"))
    config = dataclasses.replace(cached.config, decoder=dataclasses.replace(side, attention=attention))
    forgetful = Transformer(config).double().eval()
    forgetful.load_state_dict(cached.state_dict())
    return cached, forgetful


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 2, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "diverse beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "drafts": {"draft": "lookup", "draft_tokens": 3},
    "layers": {"dola_layers": "low"},
    "repetition": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "min_new_tokens": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_every_search_finds_the_texts_of_a_cache(family: str, settings: dict[str, Any]) -> None:
    """Of a batch with padding, whose rows end at different steps."""
    ids, mask = left_padded([prompts(1, 6)[0], prompts(1, 4, seed=1)[0], prompts(1, 2, seed=2)[0]])
    texts = [model.generate(ids, mask, max_new_tokens=9, **settings) for model in twins(family)]
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert torch.equal(texts[0].lengths, texts[1].lengths)
    torch.testing.assert_close(texts[0].scores, texts[1].scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_plain_loop(family: str) -> None:
    _, model = twins(family)
    ids = prompts(2, 5)
    text = ids if model.encoder is None else ids.new_full((2, 1), BOS)
    with torch.no_grad():
        for _ in range(7):
            inputs = (text,) if model.encoder is None else (ids, None)
            logits = model(*inputs, **({} if model.encoder is None else {"decoder_input_ids": text})).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    generated = model.generate(ids, max_new_tokens=7, eos=[]).sequences
    assert torch.equal(generated, text if model.encoder is None else text[:, 1:])


def test_the_numbers_of_a_prompt_continue() -> None:
    """Positions, documents and segments, given with the prompt."""
    ids = prompts(2, 6)
    inputs = {
        "position_ids": torch.tensor([[0, 1, 2, 7, 8, 9]]),
        "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2),
        "segment_ids": torch.tensor([[0, 0, 1, 1, 2, 2]] * 2),
    }
    texts = [model.generate(ids, max_new_tokens=8, eos=[], **inputs) for model in twins("decoder")]
    assert torch.equal(texts[0].sequences, texts[1].sequences)


def test_relations_and_types_of_a_prompt_continue() -> None:
    options: dict[str, Any] = {"vocab_size": 13, "position": "relation_labels(num_labels=3)"}
    ids, relations = prompts(2, 5), torch.randint(-1, 3, (2, 5, 5))
    torch.manual_seed(0)
    cached = create_model("decoder-tiny", **options).double().eval()
    forgetful = create_model("decoder-tiny", attention="forgetful", **options).double().eval()
    forgetful.load_state_dict(cached.state_dict())
    texts = [
        model.generate(ids, max_new_tokens=6, eos=[], relation_ids=relations) for model in (cached, forgetful)
    ]
    torch.testing.assert_close(texts[0].scores, texts[1].scores)
    assert torch.equal(texts[0].sequences, texts[1].sequences)


def test_a_model_without_a_cache_drafts_and_is_drafted_for() -> None:
    cached, forgetful = twins("decoder")
    ids, options = prompts(2, 5), {"max_new_tokens": 9, "eos": []}
    plain = cached.generate(ids, **options).sequences
    assert torch.equal(forgetful.generate(ids, draft=cached, **options).sequences, plain)
    assert torch.equal(cached.generate(ids, draft=forgetful, **options).sequences, plain)


def test_it_is_said_once() -> None:
    _, model = twins("decoder")
    ids = prompts(1, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.generate(ids, max_new_tokens=2)
        model.generate(ids, max_new_tokens=2)
    (warning,) = [warning for warning in said if warning.category is Caution]
    assert warning.filename == __file__
    assert str(warning.message) == (
        "generate: mechanism 'forgetful' keeps no cache, so the whole text is computed again for each token"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True}, "compile: a graph needs a KV cache"),
        ({"cache": "snapkv(budget=40)"}, "cache: mechanism 'forgetful' keeps no keys"),
    ],
    ids=["compile", "policy"],
)
def test_what_needs_a_cache_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        twins("decoder")[1].generate(prompts(1, 3), max_new_tokens=2, **options)
