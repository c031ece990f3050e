"""BERT and its descendants as decoders, loaded from transformers' files and saved back; and generation."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import exact_loss, labelled, verify_cache, verify_generation  # noqa: E402
from families import counted, shaken, texts, verify  # noqa: E402
from tiny import TINY  # noqa: E402

import polyformer  # noqa: E402
from polyformer import hub  # noqa: E402
from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

CLASSES = {"bert": "LMHeadModel", "roberta": "ForCausalLM", "xlm-roberta": "ForCausalLM"}
OPTIONS: list[dict[str, Any]] = [{}, {"layer_norm_eps": 1e-6, "tie_word_embeddings": False}]


def model_of(name: str, **options: Any) -> Any:
    kind = getattr(transformers, FAMILIES[name].class_prefix + CLASSES[name])
    torch.manual_seed(7)
    special = {"is_decoder": True, "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0}
    return kind(kind.config_class(**{**TINY[name], **special, **options}))


def positions(name: str, mask: torch.Tensor) -> torch.Tensor:
    """Theirs of the RoBERTas count from behind padding's id."""
    return counted(mask) if name == "bert" else counted(mask) + 1


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_every_class(name: str, options: dict[str, Any], side: str, tmp_path: Path):
    theirs = model_of(name, **options)
    theirs.loss_function = exact_loss
    inputs = texts(23, side=side)
    mine, other = labelled(inputs)
    bias = "cls.predictions.bias" if name == "bert" else "lm_head.bias"
    ours = verify(
        theirs,
        inputs,
        tmp_path,
        labels=mine,
        their_labels=other,
        only_theirs={"position_ids": positions(name, inputs["attention_mask"])},
        dead=(bias,) if options else (),
    )
    assert ours.encoder is None


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_caches_and_generation(name: str, tmp_path: Path):
    theirs: Any = shaken(model_of(name), 0.6)
    theirs.save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    if name == "bert":
        verify_cache(ours, theirs)
        verify_generation(ours, theirs)
        return
    ids = texts(23, (11, 11))["input_ids"]  # theirs counts positions of padded rows from the ids
    settings = {"max_new_tokens": 5, "do_sample": False, "suppress_tokens": [0, 2]}
    actual = ours.generate(ids, max_new_tokens=5, suppress_tokens=(0, 2)).sequences
    assert actual.tolist() == theirs.generate(ids, **settings).tolist()
    assert hub.wrap(ours).can_generate()


def test_what_is_not_computed_is_refused_by_name():
    for name, task in CLASSES.items():
        family, options = FAMILIES[name], TINY[name]
        with pytest.raises(InputError, match="is_decoder is False, and only True"):
            family.config({**options, "is_decoder": False}, task)
        with pytest.raises(InputError, match="add_cross_attention is True"):
            family.config({**options, "is_decoder": True, "add_cross_attention": True}, task)
        with pytest.raises(InputError, match="is_decoder is True, and only False"):
            family.config({**options, "is_decoder": True}, "Model")
