"""Neighbours found while a text is written: as by reading it anew for every token, in every search."""

import dataclasses
from pathlib import Path

import pytest
import torch
from test_store_neighbours import HELD, folder  # noqa: F401
from tiny_stores import built, tiny_model
from torch import Tensor

from polyformer import create_model
from polyformer.applications.retrieval import Retrieval, open_store
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.generation import GenerationConfig

MEMORY = {"position": "transformer_xl", "memory": "recurrent(length=64)", "head": "semiparametric"}


@pytest.fixture(scope="module")
def retrieval(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Retrieval:
    from polyformer.applications.retrieval.readers import open_reader

    reader = open_reader(checkpoint, "cpu")
    store = open_store(
        built(checkpoint, text, tmp_path_factory.mktemp("store") / "store"), reader.fingerprints
    )
    return Retrieval(reader.model, store, 3)


@pytest.fixture(scope="module")
def model() -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 260}
        return create_model(
            "decoder-tiny", num_hidden_layers=1, initializer_range=0.4, **MEMORY, **sizes
        ).eval()


def neighbours(retrieval: Retrieval, ids: Tensor) -> Tensor:
    """Of all tokens of one text, read anew."""
    first, state = retrieval.start(ids[:, :1], None, ids.shape[1])
    rest, _ = retrieval.read(ids[:, 1:], state, ids.shape[1] - 1)
    return torch.cat([first, rest], 1)


@torch.no_grad()
def greedy(model: Transformer, retrieval: Retrieval, ids: Tensor, count: int) -> Tensor:
    for _ in range(count):
        logits = model(ids, neighbour_ids=neighbours(retrieval, ids)).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


PROMPTS = [[2, *b"7 green bottles"], [2, *b"on the wall of h"]]


def test_what_is_written_is_what_reading_anew_writes(model: Transformer, retrieval: Retrieval):
    config = GenerationConfig(
        max_new_tokens=9, special=dataclasses.replace(GenerationConfig().special, eos=())
    )
    texts = [greedy(model, retrieval, torch.tensor([prompt]), 9) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts):
        ids = torch.tensor([prompt])
        for draft in (None, "lookup"):
            generated = model.generate(ids, config=config, retrieval=retrieval, draft=draft)
            assert torch.equal(generated.sequences, text)
        assert not torch.equal(model.generate(ids, config=config).sequences, text), "they change the text"
    width = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    both = model.generate(padded, mask, config=config, retrieval=retrieval).sequences
    for row, text in zip(both, texts):
        assert torch.equal(row[-9:], text[0, -9:])


def test_beams_keep_their_neighbours(model: Transformer, retrieval: Retrieval):
    """The score of each beam is that of its text, read in one pass."""
    ids = torch.tensor(PROMPTS[:1])
    settings = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0}
    beams = model.generate(ids, retrieval=retrieval, **settings, eos_token_id=[])
    for text, score in zip(beams.sequences, beams.scores):
        near = neighbours(retrieval, text[None])
        log_p = model(text[None], neighbour_ids=near).logits.log_softmax(-1)
        chosen = log_p[0, len(PROMPTS[0]) - 1 : -1].gather(1, text[len(PROMPTS[0]) :, None]).sum()
        torch.testing.assert_close(score, chosen, rtol=1e-4, atol=1e-4)


def test_models_without_the_head_for_retrieval_are_refused(retrieval: Retrieval, model: Transformer):
    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(
        InputError, match="retrieval: requires a decoder-only model with the head 'semiparametric'"
    ):
        tiny_model().generate(ids, retrieval=retrieval)
    with pytest.raises(InputError, match="max_new_tokens: the frozen model reads "):
        model.generate(ids, retrieval=retrieval, max_new_tokens=5000)
