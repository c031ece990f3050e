"""What a store holds: an entry for each token, whoever reads the text and in however many parts."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_stores import READING, TEXT, built, content, lines, manifest, tiny_model

from polyformer.applications.retrieval.readers import (
    Reading,
    changed_settings,
    model_fingerprint,
    open_reader,
    windows,
)
from polyformer.applications.retrieval.store import build, merge, open_folder, part_folder
from polyformer.nn.stack.last_feedforward import LastFeedForwardInput
from polyformer.training.recipes import fit
from tiny_recipes import tiny_recipe


@pytest.mark.parametrize(("length", "context"), [(1, 0), (5, 0), (5, 2), (7, 6), (100, 0), (100, 30)])
def test_every_token_but_the_first_is_the_target_of_one_window(length: int, context: int):
    for tokens in (0, 1, 2, 23, 101):
        documents = [list(range(start, min(start + 6, tokens))) for start in range(0, tokens, 6)]
        targets: list[int] = []
        for number, window in enumerate(windows(documents, Reading(length=length, context=context))):
            assert window.number == number
            assert len(window.ids) <= length + 1
            assert window.documents.tolist() == [token // 6 for token in window.ids]
            assert window.ids.tolist() == list(range(window.ids[0], window.ids[-1] + 1))
            assert window.carried == min(context, targets[-1] if targets else 0)
            targets += window.ids[window.carried + 1 :].tolist()
            assert window.entries == len(window.ids[window.carried + 1 :])
        assert targets == list(range(1, tokens))


def test_keys_are_what_the_last_feedforward_reads(checkpoint: Path, text: Path, store: Path):
    """Computed window by window from the parts of the model, with pre-norm after the norm."""
    reader, entries = open_reader(checkpoint, "cpu"), open_folder(store)
    tokens = [token for ids in reader.encode(list(lines(text))) for token in ids]
    assert entries.values.tolist() == tokens[1:]
    layer = reader.model.decoder.sequence[-1]
    read: list[torch.Tensor] = []
    layer.feedforward.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0]))
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, READING.fresh):
            first = max(0, start - READING.context)
            reader.model(torch.tensor([tokens[first : start + READING.fresh][: len(tokens) - 1 - first]]))
            keys = read[-1][0, start - first :].half().numpy()
            np.testing.assert_allclose(entries.keys[start : start + len(keys)], keys, atol=4e-3)


def test_a_norm_comes_before_the_keys_where_the_block_has_one(checkpoint: Path):
    model = tiny_model()
    assert model.config.decoder.block.kind == "pre"
    last = LastFeedForwardInput(model.decoder)
    with torch.no_grad(), last:
        model(torch.randint(3, 260, (2, 9)))
        key = last.value
    norm = model.decoder.sequence[-1].block.norms[1]
    centred = (key - norm.bias) / norm.weight
    torch.testing.assert_close(centred.mean(-1), torch.zeros(2, 9), atol=1e-5, rtol=0)
    torch.testing.assert_close(centred.var(-1, unbiased=False), torch.ones(2, 9), atol=1e-3, rtol=0)


def test_parts_make_the_same_store(checkpoint: Path, text: Path, store: Path, tmp_path: Path):
    for part in (3, 1, 2):
        built(checkpoint, text, part_folder(tmp_path, part, 3), part, 3)
    merged = open_folder(tmp_path) if merge(tmp_path) == merge(tmp_path) else None
    assert merged is not None
    assert merged.manifest == open_folder(store).manifest
    np.testing.assert_allclose(merged.keys, open_folder(store).keys, atol=4e-3)
    assert merged.values.tolist() == open_folder(store).values.tolist()


def test_a_finished_store_stays_as_it_is(checkpoint: Path, text: Path, store: Path):
    before = {path.name: path.stat().st_mtime_ns for path in store.iterdir() if path.name != ".lock"}
    built(checkpoint, text, store)
    after = {path.name: path.stat().st_mtime_ns for path in store.iterdir() if path.name != ".lock"}
    assert before == after


def test_documents_of_a_run_do_not_see_one_another(tmp_path: Path):
    """The second of two documents has the keys that it has alone; each stands between <bos> and <eos>."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    fit(tiny_recipe(text), tmp_path / "run")
    reader = open_reader(tmp_path / "run", "cpu")
    assert reader.isolated
    keys = {}
    for name, documents in {"both": ["one two", "three"], "alone": ["three"]}.items():
        described = manifest(reader, text)
        build(reader, documents, described, tmp_path / name)
        keys[name] = open_folder(tmp_path / name)
    size = len("three") + 1
    np.testing.assert_allclose(keys["both"].keys[-size:], keys["alone"].keys, atol=4e-3)
    bos, eos = reader.tokenizer.bos_id, reader.tokenizer.eos_id
    assert keys["both"].values[-size - 2 : -size].tolist() == [eos, bos]


def test_a_model_of_transformers_is_read_by_its_hidden_states(checkpoint: Path, tmp_path: Path):
    import transformers

    config = transformers.CodeGenConfig(
        vocab_size=260, n_embd=16, n_inner=32, n_layer=1, n_head=4, rotary_dim=4
    )
    model = transformers.CodeGenForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    reader = open_reader(tmp_path, "cpu")
    assert (reader.key, reader.dimension) == ("hidden", 16)
    ids = torch.randint(4, 260, (2, 7))
    keys, logits = reader.read(ids, None)
    with torch.no_grad():
        torch.testing.assert_close(logits(), model(ids).logits)
        torch.testing.assert_close(keys, model.base_model(ids).last_hidden_state)


def test_a_fingerprint_tells_models_apart_and_knows_them_again():
    prints = {model_fingerprint(tiny_model(seed), "config") for seed in (0, 0, 1)}
    assert len(prints) == 2
    changed = tiny_model()
    changed.tokens.weight.data[3, 3] += 1e-6
    assert model_fingerprint(changed, "config") not in prints
    assert model_fingerprint(tiny_model(), "another") not in prints


def test_content_is_half_precision_rows(store: Path):
    keys, values = content(store)
    assert len(keys) == len(values) // 4 * 16 * 2


def test_an_option_with_its_default_value_is_no_part_of_a_fingerprint():
    config = tiny_model().config
    settings = changed_settings(config)
    assert settings["hidden_size"] == 16
    assert "weights" not in settings
    assert settings["decoder"]["num_hidden_layers"] == 2
    assert changed_settings(dataclasses.replace(config, hidden_size=32)) != settings
