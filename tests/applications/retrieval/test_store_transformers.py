"""Texts by transformers' own `generate` with neighbours mixed in, of a family that is not ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stores import TEXT

from polyformer.applications.retrieval.mixture import Mixture, generate, mixed, neighbour_probabilities
from polyformer.applications.retrieval.readers import TransformersReader
from polyformer.applications.retrieval.store import FolderStore, MixtureConfig, open_folder
from polyformer.cli.main import main

V = 260
CONFIG = MixtureConfig(weight=0.5, temperature=0.5, neighbours=12)
PROMPT = "8 green bottles hang"


@pytest.fixture(scope="module")
def codegen(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of bytes."""
    import transformers

    folder = tmp_path_factory.mktemp("codegen")
    sizes = {"n_embd": 32, "n_inner": 64, "n_positions": 80, "rotary_dim": 8}
    config = transformers.CodeGenConfig(vocab_size=V, n_layer=2, n_head=4, initializer_range=0.4, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.CodeGenForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def reader(codegen: Path) -> TransformersReader:
    return TransformersReader(codegen, torch.device("cpu"))


@pytest.fixture(scope="module")
def entries(codegen: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> FolderStore:
    folder = tmp_path_factory.mktemp("store") / "codegen"
    assert main(["datastore", "build", str(codegen), str(text), "--out", str(folder), "--length", "60"]) == 0
    return open_folder(folder)


def plainly(reader: TransformersReader, **settings: Any) -> list[int]:
    """What transformers writes without neighbours."""
    ids = torch.tensor(reader.encode([PROMPT]))
    sequences = reader.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return sequences[0, ids.shape[1] :].tolist()


@torch.no_grad()
def next_probabilities(reader: TransformersReader, entries: FolderStore, ids: list[int]) -> torch.Tensor:
    """p [V] of the token after `ids`, from the whole text at once, by the definition."""
    output = reader.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    stored = torch.from_numpy(entries.keys.astype("f4")), torch.from_numpy(entries.values.copy())
    key = output.hidden_states[-1][:, -1]
    share = neighbour_probabilities(key, *stored, CONFIG.neighbours, CONFIG.temperature, V)
    return mixed(output.logits[:, -1].softmax(-1), share, CONFIG.weight)[0]


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"repetition_penalty": 1.3}])
def test_without_a_share_it_is_transformers_text(
    settings: dict[str, Any], reader: TransformersReader, entries: FolderStore
):
    nothing = Mixture(entries, MixtureConfig(weight=0.0, temperature=1.0, neighbours=3))
    tokens = generate(reader, nothing, PROMPT, {"max_new_tokens": 20, **settings})
    if "repetition_penalty" not in settings:  # which divides logits, and multiplies what is below 0
        assert tokens == plainly(reader, max_new_tokens=20, **settings)
    assert tokens != generate(reader, Mixture(entries, CONFIG), PROMPT, {"max_new_tokens": 20, **settings})


def test_every_token_is_the_likeliest_of_the_mixture(reader: TransformersReader, entries: FolderStore):
    tokens = generate(reader, Mixture(entries, CONFIG), PROMPT, {"max_new_tokens": 12})
    (ids,) = reader.encode([PROMPT])
    for token in tokens:
        p = next_probabilities(reader, entries, ids)
        assert float(p[token]) == pytest.approx(float(p.max()), rel=1e-3)
        ids = [*ids, token]


def test_beams_are_of_the_mixture(reader: TransformersReader, entries: FolderStore):
    def log_p(tokens: list[int]) -> float:
        (ids,) = reader.encode([PROMPT])
        start, both = len(ids), [*ids, *tokens]
        return sum(
            float(next_probabilities(reader, entries, both[:place])[both[place]].log())
            for place in range(start, len(both))
        )

    mixture = Mixture(entries, CONFIG)
    settings = {"max_new_tokens": 6, "eos_token_id": None}
    beams = generate(reader, mixture, PROMPT, {"num_beams": 4, **settings})
    assert log_p(beams) >= log_p(generate(reader, mixture, PROMPT, settings)) - 1e-3


def test_samples_follow_the_seed_and_leave_torchs_alone(reader: TransformersReader, entries: FolderStore):
    mixture, settings = Mixture(entries, CONFIG), {"max_new_tokens": 15, "do_sample": True}
    before = torch.get_rng_state()
    first, again, other = (
        generate(reader, mixture, PROMPT, {**settings, "seed": seed}) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_forbidden_stays_so_whatever_the_neighbours_say(
    reader: TransformersReader, entries: FolderStore
):
    """The text of the store repeats itself: the mixture comes before the rule."""
    near = Mixture(entries, MixtureConfig(weight=0.99, temperature=0.5, neighbours=4))
    tokens = generate(reader, near, PROMPT, {"max_new_tokens": 40, "no_repeat_ngram_size": 2})
    (ids,) = reader.encode([PROMPT])
    pairs = list(zip([*ids, *tokens], [*ids, *tokens][1:]))[len(ids) - 1 :]
    assert len(set(pairs)) == len(pairs)


def test_no_hook_is_left_behind(reader: TransformersReader, entries: FolderStore):
    generate(reader, Mixture(entries, CONFIG), PROMPT, {"max_new_tokens": 2})
    assert not reader.model._forward_hooks
    assert not reader.model._forward_pre_hooks


def test_the_command(
    codegen: Path, entries: FolderStore, capsys: pytest.CaptureFixture[str], complaint: Callable[..., str]
):
    """With nearly all from its neighbours it goes on as the text does."""
    words = ["generate", codegen, "--datastore", entries.folder, "--lambda", 0.99, "--knn-temperature", 0.5]
    words += ["--prompt", TEXT[:30], "--neighbours", 1]

    def printed(*more: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), *map(str, more)]) == 0
        return capsys.readouterr().out

    assert printed("--max-new-tokens", 12) == TEXT[:42] + "\n"
    assert printed("--max-new-tokens", 40, "--stop", "house") == TEXT[: TEXT.index("house")] + "\n"
    assert printed("--max-new-tokens", 12, "--num-beams", 2).startswith(TEXT[:30])
    assert "--draft: not available for" in complaint(*words, "--draft", "lookup")
    assert "exceed the limit of 80 tokens" in complaint(*words, "--max-new-tokens", 70)
    assert "--lambda: expected a share" in complaint(*words[:4], "--lambda", 2, "--knn-temperature", 1)
