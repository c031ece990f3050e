"""Contrastive search and DoLa against plain loops over whole texts: no cache, no batch; and by hand."""

import math
from typing import Any

import pytest
import torch
from tiny_models import BOS, EOS, FAMILIES, SPECIAL, VOCAB, decoder, left_padded, pair, prompts
from torch import Tensor

from polyformer import InputError, create_model
from polyformer.models.architectures import Transformer
from polyformer.models.generation.config import with_settings
from polyformer.models.generation.hub_format import from_hub
from polyformer.models.generation.processors import candidate_layers, contrasted, divergence
from polyformer.models.generation.search import contrast

LENGTHS = (4, 1, 6)


@torch.no_grad()
def whole(model: Transformer, prompt: Tensor, tokens: list[int]) -> Any:
    """The model's output for a text at once."""
    new = prompt.new_tensor(tokens).view(1, -1)
    if model.encoder is None:
        return model(torch.cat([prompt.view(1, -1), new], 1), output_hidden_states=True)
    start = torch.cat([prompt.new_full((1, 1), BOS), new], 1)
    return model(prompt.view(1, -1), decoder_input_ids=start, output_hidden_states=True)


@torch.no_grad()
def by_contrast(model: Transformer, prompt: Tensor, k: int, alpha: float, length: int) -> list[int]:
    """The equation of Su et al. 2022, section 4.2."""
    text: list[int] = []
    while len(text) < length and EOS not in text:
        p = whole(model, prompt, text).logits[0, -1].softmax(-1)
        values = []
        for v in p.topk(k).indices.tolist():
            *before, own = whole(model, prompt, [*text, v]).last_hidden_state[0]
            likeness = max(float(torch.cosine_similarity(own, h, dim=0)) for h in before)
            values.append(((1 - alpha) * float(p[v]) - alpha * likeness, v))
        text.append(max(values)[1])
    return text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("k", "alpha"), [(4, 0.6), (2, 0.3), (VOCAB, 1.0)])
def test_contrastive_search_is_the_equation(family: str, k: int, alpha: float):
    model = FAMILIES[family](k)
    texts = [prompts(1, length, k)[0] for length in LENGTHS]
    actual = model.generate(*left_padded(texts), penalty_alpha=alpha, top_k=k, max_new_tokens=6)
    expected = [by_contrast(model, text, k, alpha, 6) for text in texts]
    assert actual.new_tokens() == expected


def test_contrasts_change_what_is_written():
    model, ids = decoder(2), prompts(4, 5)
    greedy = model.generate(ids, max_new_tokens=8).new_tokens()
    assert model.generate(ids, max_new_tokens=8, penalty_alpha=0.9).new_tokens() != greedy
    assert model.generate(ids, max_new_tokens=8, dola_layers=(0,)).new_tokens() != greedy


def test_contrast_by_hand():
    """Two candidates, of which the likelier points where the text does."""
    hidden, past = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[math.nan] * 2, [1.0, 0.0]]])
    value = contrast(torch.tensor([[0.6, 0.4]]), hidden, past, 0.5)
    torch.testing.assert_close(value, torch.tensor([[0.3 - 0.5, 0.2 - 0.0]]))
    forbidden = contrast(torch.tensor([[1.0, 0.0]]), hidden, past, 0.5)
    assert forbidden[0, 1] == -torch.inf


def test_contrastive_search_obeys_processors_and_streams():
    shown: list[Tensor] = []
    model, ids = decoder(1), prompts(2, 3)
    options: dict[str, Any] = {"penalty_alpha": 0.6, "max_new_tokens": 5, "no_repeat_ngram_size": 1}
    actual = model.generate(ids, None, None, shown.append, suppress_tokens=(EOS,), **options)
    assert torch.equal(torch.stack(shown, 1), actual.sequences[:, 3:])
    assert all(len(set(row)) == len(row) for row in actual.sequences.tolist())


@pytest.mark.parametrize(
    "options", [{"mechanism": "performer"}, {"memory": {"kind": "recurrent", "length": 4}}]
)
def test_contrastive_search_by_other_states(options: dict[str, Any]):
    torch.manual_seed(0)
    small = {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    position = "transformer_xl" if "memory" in options else "sinusoidal"
    model = create_model(
        "decoder-tiny", vocab_size=VOCAB, initializer_range=0.8, position=position, **small, **options
    )
    model = model.double().eval()
    text = prompts(1, 3)[0]
    actual = model.generate(text[None], penalty_alpha=0.6, top_k=3, max_new_tokens=5, eos=())
    expected = model.generate(
        left_padded([text, prompts(1, 3)[0]])[0], penalty_alpha=0.6, top_k=3, max_new_tokens=5, eos=()
    )
    assert actual.new_tokens()[0] == expected.new_tokens()[0]
    if "memory" not in options:
        own = by_contrast(model, text, 3, 0.6, 5)
        assert actual.new_tokens()[0][: len(own)] == own


@torch.no_grad()
def by_layers(model: Transformer, prompt: Tensor, layers: tuple[int, ...], length: int) -> list[int]:
    """The equations of Chuang et al. 2024, section 2."""
    text: list[int] = []
    stack = model.decoder
    assert stack is not None
    while len(text) < length and EOS not in text:
        output = whole(model, prompt, text)
        p = output.logits[0, -1].softmax(-1)
        others = []
        for layer in layers:
            state = stack.final_norm(output.hidden_states[layer])
            q = model.predictions(state)[0, -1].softmax(-1)
            m = (p + q) / 2
            jsd = 0.5 * (p * (p / m).log()).sum() + 0.5 * (q * (q / m).log()).sum()
            others.append((float(jsd), q))
        q = max(others, key=lambda pair: pair[0])[1]
        scores = (p.log() - q.log()).masked_fill(p < 0.1 * p.max(), -torch.inf)
        text.append(int(scores.argmax()))
    return text


def deep(family: str) -> Transformer:
    """Of three layers a stack."""
    torch.manual_seed(5)
    small = {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 3}
    preset = {"decoder": "decoder-tiny", "pair": "transformer-tiny"}[family]
    return (
        create_model(preset, vocab_size=VOCAB, special=SPECIAL, initializer_range=0.8, **small)
        .double()
        .eval()
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [(0, 1, 2), (1,), (0, 2)])
def test_dola_is_the_equation(family: str, layers: tuple[int, ...]):
    model = deep(family)
    texts = [prompts(1, length, 5)[0] for length in LENGTHS]
    actual = model.generate(*left_padded(texts), dola_layers=layers, max_new_tokens=6).new_tokens()
    assert actual == [by_layers(model, text, layers, 6) for text in texts]


def test_dola_goes_with_sampling_and_a_look_up():
    model, ids = decoder(4), prompts(2, 6)
    options: dict[str, Any] = {"dola_layers": "high", "max_new_tokens": 8}
    greedy = model.generate(ids, **options)
    drafted = model.generate(ids, draft="lookup", **options)
    assert drafted.new_tokens() == greedy.new_tokens()
    sampled = model.generate(ids, do_sample=True, seed=3, **options)
    assert sampled.scores.isfinite().all()


def test_dola_by_hand():
    """Two layers, of which the first is farther from the last one; the third token is not plausible."""
    last = torch.tensor([0.6, 0.37, 0.03]).log()
    near, far = torch.tensor([0.5, 0.45, 0.05]).log(), torch.tensor([0.9, 0.05, 0.05]).log()
    expected = torch.tensor([0.6 / 0.9, 0.37 / 0.05])
    expected = (expected / expected.sum()).log()
    actual = contrasted(last, [far, near])
    torch.testing.assert_close(actual[:2], expected)
    assert actual[2] == -torch.inf
    assert divergence(last, far) > divergence(last, near) > 0
    apart = divergence(torch.tensor([1.0, 0.0]).log(), torch.tensor([0.0, 1.0]).log())
    torch.testing.assert_close(apart, torch.tensor(math.log(2)))


@pytest.mark.parametrize(
    ("layers", "depth", "tied", "expected"),
    [
        ("low", 12, False, (0, 2, 4)),
        ("low", 12, True, (2, 4)),
        ("high", 12, True, (6, 8, 10)),
        ("low", 48, False, tuple(range(0, 20, 2))),
        ("high", 48, True, tuple(range(28, 48, 2))),
        ("low", 2, True, (0,)),
        ((4, 0, 4), 6, True, (0, 4)),
    ],
)
def test_candidate_layers(layers: Any, depth: int, tied: bool, expected: tuple[int, ...]):
    assert candidate_layers(layers, depth, tied) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty_alpha": 0.6, "num_beams": 2}, "penalty_alpha and num_beams"),
        ({"penalty_alpha": 0.6, "do_sample": True}, "penalty_alpha and do_sample"),
        ({"penalty_alpha": 0.6, "dola_layers": "low"}, "penalty_alpha and dola_layers"),
        ({"penalty_alpha": 0.6, "num_return_sequences": 2}, "contrastive search returns one text"),
        (
            {"penalty_alpha": 0.6, "draft": "lookup"},
            "draft: speculative decoding does not support contrastive search",
        ),
        ({"penalty_alpha": 1.5}, r"contrastive\.penalty_alpha: expected a number from 0 to 1"),
        ({"penalty_alpha": 0.6, "top_k": 1}, "candidates: expected 2 or more"),
        ({"candidates": 3}, "candidates: only contrastive search uses it"),
        ({"dola_layers": "low", "num_beams": 2}, "dola_layers and num_beams"),
        ({"dola_layers": (2,)}, "dola_layers: expected layers from 0 to 1"),
        ({"dola_layers": "middle"}, "dola_layers: expected"),
        ({"dola_layers": (-1,)}, "dola_layers: expected 'low', 'high' or numbers"),
    ],
)
def test_what_contradicts_is_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        decoder().generate(prompts(1, 2), max_new_tokens=4, **options)


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, {"penalty_alpha": 0.6, "candidates": 4}),
        ({"dola_layers": "high"}, {"dola_layers": "high"}),
    ],
)
def test_the_hub_names_them_so(data: dict[str, Any], settings: dict[str, Any]):
    config = from_hub(data)
    assert config == with_settings(from_hub({}), settings)
    assert pair().generate(prompts(1, 3), None, config).sequences.numel()
