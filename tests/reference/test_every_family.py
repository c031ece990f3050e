"""Of every family: each option of transformers' configuration is honoured, refused by name, or inert; and its
sizes have as many parameters as transformers' models."""

import os

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.model import Transformer  # noqa: E402
from polyformer.presets import model_config  # noqa: E402

EVERYWHERE = {
    "transformers_version",
    "architectures",
    "model_type",
    "dtype",
    "_name_or_path",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
}
"""Options of all configurations that change no number, or are read by the heads."""

PRESENT = [name for name in FAMILIES if not FAMILIES[name].removed]
"""The families that transformers still has."""


def known(name: str) -> set[str]:
    family = FAMILIES[name]
    fields = {option.theirs for task in family.tasks.values() for option in task.config_mapping}
    fields |= {option.theirs for option in family.config_mapping}
    return fields | {
        *family.required,
        *family.ignored_options,
        *family.other_options,
        *family.head_dropouts,
        *family.aliases,
    }


@pytest.mark.parametrize("name", PRESENT)
def test_every_option_is_known(name: str):
    options = set(transformers.AutoConfig.for_model(name).to_dict()) - EVERYWHERE
    assert options <= known(name), f"{options - known(name)} are neither honoured nor refused"


@pytest.mark.parametrize("name", PRESENT)
def test_what_has_one_value_is_refused_with_another(name: str):
    family = FAMILIES[name]
    task = next(iter(family.tasks))
    hub = transformers.AutoConfig.for_model(name).to_dict()
    for option, value in family.required.items():
        other = {bool: not value, str: f"not-{value}"}.get(type(value), 17)
        with pytest.raises(InputError, match=f"config.json: {option} is"):
            family.config({**hub, option: other}, task)


SIZES = [(name, preset) for name in PRESENT for preset in FAMILIES[name].sizes]


@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_sizes_have_as_many_parameters_as_theirs(name: str, preset: str):
    family = FAMILIES[name]
    described, task = family.hub_config(model_config(preset))
    with torch.device("meta"):
        ours = Transformer(model_config(preset))
        config = transformers.AutoConfig.for_model(**described)
        theirs = getattr(transformers, family.class_prefix + task)(config)
    read = {link.theirs for link in family.links(ours.config, task, ours.state_dict())}
    unused = [
        name
        for name, _ in theirs.named_parameters()
        if family.ignores(name) or (name not in read and family.unused_key(task, name))
    ]
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    counts[1] -= sum(theirs.get_parameter(name).numel() for name in unused)
    tied = name == "t5" and not described["tie_word_embeddings"]  # transformers 5 makes every T5 tied
    assert counts[0] == counts[1] + (ours.head.weight.numel() if tied else 0)
