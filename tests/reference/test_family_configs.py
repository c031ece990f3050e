"""Of every family: each option of transformers' configuration is honoured, refused by name, or inert; and its
sizes have as many parameters as the published ones and as transformers' models."""

from typing import Any

import pytest
import torch
from family_table import TABLE, classes, language_model, read_config, their_config

from polyformer.core.errors import InputError
from polyformer.models.architectures import build_model
from polyformer.models.checkpoints import FAMILIES
from polyformer.models.checkpoints.config_mapping import differences
from polyformer.models.checkpoints.load import REFUSED
from polyformer.models.checkpoints.save import find_family
from polyformer.models.presets import model_config

transformers = pytest.importorskip("transformers")

MISSING = {"esm": {"vocab_size": 33, "pad_token_id": 1}}
"""Options that every file has, and for which transformers' defaults are None."""

EVERYWHERE = {
    *("transformers_version", "architectures", "model_type", "dtype", "_name_or_path", "use_cache"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "id2label", "label2id", "problem_type"),
}
"""Options of all configurations that change no number, or are read by the heads."""


def known(name: str) -> set[str]:
    family = FAMILIES[name]
    fields = {option.theirs for task in family.tasks.values() for option in task.config_mapping}
    fields |= {option.theirs for option in family.config_mapping}
    lists = (
        family.required,
        family.ignored_options,
        family.other_options,
        family.head_dropouts,
        family.aliases,
    )
    return fields.union(*lists)


def refusal(name: str, options: dict[str, Any], task: str | None = None) -> str:
    """What is said of a configuration; nothing where it is taken."""
    try:
        config = their_config(name, next(iter(FAMILIES[name].tasks)))
        if task is None:
            build_model(read_config(config, **options))
        else:
            hub = {key: value for key, value in {**config.to_dict(), **options}.items() if value != "absent"}
            FAMILIES[name].config(hub, task)
    except InputError as error:
        return str(error)
    return ""


def test_every_family_is_in_the_table():
    """Those without a class in transformers have tests of their own."""
    within = {name for name in FAMILIES if not (FAMILIES[name].removed or FAMILIES[name].outside)}
    assert {*TABLE} == within
    assert not any(name in transformers.CONFIG_MAPPING for name in FAMILIES if FAMILIES[name].outside)


def test_every_option_is_known():
    unknown = {
        name: {*transformers.AutoConfig.for_model(name).to_dict()} - EVERYWHERE - known(name)
        for name in TABLE
    }
    assert not any(unknown.values()), f"{unknown} are neither honoured nor refused"


def test_what_has_one_value_is_refused_with_another():
    for name in TABLE:
        hub = {**transformers.AutoConfig.for_model(name).to_dict(), **MISSING.get(name, {})}
        for option, value in FAMILIES[name].required.items():
            other = {bool: not value, str: f"not-{value}"}.get(type(value), 17)
            with pytest.raises(InputError, match=f"config.json: {option} is"):
                FAMILIES[name].config({**hub, option: other}, next(iter(FAMILIES[name].tasks)))


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name].refused])
def test_what_is_not_computed_is_named(name: str):
    """By the classes that read the option; the language model reads it where only another class does not."""
    for options, message, *task in TABLE[name].refused:
        assert refusal(name, options, *task).startswith(message), refusal(name, options, *task)
        if {*options} <= {"summary_type", "summary_activation", "summary_use_proj", "summary_proj_to_labels"}:
            assert not refusal(name, options, language_model(name))


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def their_size(name: str, task: str, ours: Any, options: dict[str, Any]) -> int:
    """Without parameters that transformers reads nowhere."""
    family = FAMILIES[name]
    theirs = getattr(transformers, family.class_prefix + task)
    theirs = theirs(theirs.config_class(**options))
    read = {link.theirs for link in family.links(ours.config, task, ours.state_dict())}
    named = theirs.named_parameters()
    return sum(
        parameter.numel()
        for key, parameter in named
        if not family.ignores(key) and (key in read or not family.unused_key(task, key))
    )


@pytest.mark.parametrize("name", [name for name in TABLE if FAMILIES[name].sizes])
def test_sizes_are_the_published_ones(name: str):
    """Ours and theirs, by what we say of a preset; and presets are saved as of their own family."""
    entry = TABLE[name]
    assert entry.published.keys() == {*FAMILIES[name].sizes}
    for preset, count in entry.published.items():
        config = model_config(preset)
        family, hub, task = find_family(config)
        assert family.model_type == name
        assert family.config(hub, task) == config
        with torch.device("meta"):
            ours = build_model(config)
            theirs = their_size(name, task, ours, hub)
            again = (
                their_size(name, task, ours, entry.described[preset]) if preset in entry.described else theirs
            )
        tied = name == "t5" and not hub["tie_word_embeddings"]  # transformers 5 makes every T5 tied
        assert size(ours) == count, preset
        assert theirs == again == count - (ours.head.weight.numel() if tied else 0), preset


def test_presets_have_the_layers_of_published_configurations():
    """In families whose configurations say all of them."""
    for name in ("ctrl", "gpt_neo", "gptj", "longformer", "modernbert"):
        for preset, options in TABLE[name].described.items():
            ours, theirs = (
                model_config(preset),
                read_config(transformers.AutoConfig.for_model(name, **options)),
            )
            assert (theirs.encoder, theirs.decoder) == (ours.encoder, ours.decoder), preset
    assert FAMILIES["modernbert"].config({}, "ForMaskedLM") == model_config("modernbert-base")


GROUPS, SIZE = "decoder.attention.num_key_value_heads", "decoder.attention.head_size"
ENCODER = {"encoder.attention.num_key_value_heads", "encoder.attention.head_size"}
LEFT_OUT = {
    **{
        name: {GROUPS}
        for name in ("cohere", "deepseek_v2", "granite", "granitemoe", "olmo2", "olmo3", "phi", "phi3")
    },
    **{"cohere2": {GROUPS, SIZE}, "eurobert": ENCODER, "llama": {GROUPS, SIZE}, "mistral": {SIZE}},
    "nomic_bert": {"encoder.attention.head_size"},
}
"""Defaults that transformers computes of other options, and we where they are used."""


def test_defaults_are_theirs():
    """Of the options that a file does not name, for every class."""
    for name, task in classes():
        family = FAMILIES[name]
        required = {**family.required, **family.tasks[task].required}
        required |= {"is_decoder": True} if name == "reformer" else {}
        required |= {"num_experts_per_tok": 2} if name == "deepseek_v2" else {}  # their default is None
        required |= MISSING.get(name, {})
        theirs = {**transformers.AutoConfig.for_model(name).to_dict(), **required}
        ours, expected = (family.config(hub, task).to_dict() for hub in (required, theirs))
        del ours["origin"], expected["origin"]
        others = {item.partition(":")[0] for item in differences(ours, expected)}
        assert others == LEFT_OUT.get(name, set()), f"{name}: {task}"


def test_refused_families_are_of_transformers_and_not_of_ours():
    assert {*REFUSED} <= {*transformers.CONFIG_MAPPING.keys()}
    assert not {*REFUSED} & {*FAMILIES}
