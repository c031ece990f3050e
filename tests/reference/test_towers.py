"""CLIP and SigLIP as wholes: vectors, logits, losses and gradients of both towers, and ways of saving."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import back, loaded, same, shaken, texts
from family_inputs import ended
from torch import Tensor

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.architectures import TowersConfig, TwoTowers
from polyformer.models.checkpoints import FAMILIES, from_transformers
from polyformer.models.checkpoints.load import names_in_files
from polyformer.models.checkpoints.save import to_hub_tensors

transformers = pytest.importorskip("transformers")

TEXT = {
    **{"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20},
    **{"vocab_size": 23, "max_position_embeddings": 11, "layer_norm_eps": 1e-3},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 5},
}
IMAGE = {
    **{"hidden_size": 10, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 14},
    **{"image_size": 8, "patch_size": 2, "layer_norm_eps": 1e-2, "hidden_act": "gelu"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"projection_dim": 7, "logit_scale_init_value": 1.5, "text_config": TEXT, "vision_config": IMAGE},
    "siglip": {"text_config": {**TEXT, "projection_size": 10}, "vision_config": IMAGE},
}
NAMES = [*OPTIONS]


def their_model(name: str, **changes: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(name, **{**OPTIONS[name], **changes})
    return shaken(transformers.AutoModel.from_config(config))


def inputs(name: str) -> dict[str, Tensor]:
    """Three texts and three images; SigLIP's texts have no padding that is masked."""
    read = texts(23, (11, 11, 11) if name == "siglip" else (11, 8, 3))
    if name == "clip":
        read["input_ids"] = ended(read["input_ids"], read["attention_mask"], 5)
    pixels = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return {**read, "pixel_values": pixels}


@pytest.mark.parametrize("name", NAMES)
def test_all_that_both_compute_is_equal(name: str, tmp_path: Path):
    theirs = their_model(name)
    ours, read = loaded(theirs, tmp_path / "theirs"), inputs(name)
    assert isinstance(ours, TwoTowers)
    mine, other = ours(**read, return_loss=True), theirs(**read, return_loss=True)
    same(mine.logits_per_image, other.logits_per_image)
    same(mine.text_vectors, other.text_embeds)
    same(mine.image_vectors, other.image_embeds)
    same(mine.loss, other.loss)
    same(ours.encode_texts(read["input_ids"], read["attention_mask"]), mine.text_vectors)
    mine.loss.backward()
    other.loss.backward()
    family = FAMILIES[name]
    slopes: dict[str, Any] = {key: parameter.grad for key, parameter in ours.named_parameters()}
    config: Any = ours.config
    actual = to_hub_tensors(family, config, "Model", slopes)
    expected = names_in_files(theirs, {key: p.grad for key, p in theirs.named_parameters()})
    assert actual.keys() == expected.keys()
    for key, slope in expected.items():
        same(actual[key], slope)
    back(ours, theirs, tmp_path)
    assert from_transformers(theirs).config == ours.config


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_are_theirs(name: str):
    theirs = their_model(name)
    ours: Any = from_transformers(theirs)
    read = inputs(name)
    vectors = ours.encode_texts(read["input_ids"], read["attention_mask"])
    shares = ours.probabilities(vectors, ours.encode_images(read["pixel_values"]))
    logits = theirs(**read).logits_per_image
    same(shares, logits.softmax(1) if name == "clip" else logits.sigmoid())


def test_a_clip_of_the_first_files_ends_texts_with_the_greatest_id():
    theirs = their_model("clip", text_config={**TEXT, "eos_token_id": 2})
    ours: Any = from_transformers(theirs)
    read = inputs("clip")
    ids, mask = read["input_ids"], read["attention_mask"]
    read["input_ids"] = ids.masked_fill(ids == 22, 7).where(ids != 5, 22)
    mine, other = ours(**read), theirs(**read)
    same(mine.text_vectors, other.text_embeds)
    assert mask.sum() < mask.numel()
    hub, _ = FAMILIES["clip"].hub_config(ours.config)
    assert hub["text_config"]["eos_token_id"] == 2


def test_the_initial_scale_and_other_options_are_kept(tmp_path: Path):
    theirs = their_model("clip", initializer_factor=0.5)
    ours = loaded(theirs, tmp_path / "theirs")
    assert ours.config.initial_scale == 1.5
    ours.save_pretrained(tmp_path / "hub", format="hub")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "hub")
    assert (again.initializer_factor, again.projection_dim) == (0.5, 7)
    for part in ("text_config", "vision_config"):
        options = getattr(theirs.config, part).to_dict()
        assert {**options, "projection_dim": 7} == {"projection_dim": 7, **getattr(again, part).to_dict()}


def test_a_new_model_becomes_a_checkpoint(tmp_path: Path):
    template: Any = FAMILIES["clip"].template
    small = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 8}
    text, image = template.text, template.image
    for name, value in {**small, "vocab_size": 23}.items():
        text = text.override(name, value)
    for name, value in {**small, "image_size": [4, 4], "patch_size": [2, 2]}.items():
        image = image.override(name, value)
    text = text.override("head.end_token", 5).override("head.normalize", False)
    text = text.override("special.eos", 5).override("special.pad", 0).override("special.bos", 1)
    config = TowersConfig(text=text, image=image.override("head.normalize", False))
    ours = TwoTowers(config).eval()
    ours.save_pretrained(tmp_path, format="hub")
    theirs = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    read = {**inputs("clip"), "pixel_values": torch.randn(2, 3, 4, 4)}
    same(ours(**read).logits_per_image, theirs(**read).logits_per_image, 1e-5)
    assert polyformer.from_pretrained(tmp_path).config == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 3}, "config.json: text_config is 3, expected an object of options or null"),
        ({"vision_config": {**IMAGE, "hidden_act": "mish"}}, "unknown hidden_act 'mish'"),
        ({"architectures": ["CLIPForImageClassification"]}, "architecture of 'clip' 'CLIPForImageClass"),
    ],
)
def test_what_is_not_computed_is_named(changes: dict[str, Any], message: str):
    hub = {"model_type": "clip", "architectures": ["CLIPModel"], **OPTIONS["clip"], **changes}
    with pytest.raises(InputError, match=message):
        FAMILIES["clip"].config(hub, FAMILIES["clip"].task(hub, None))


def test_towers_without_a_common_space_are_refused():
    config = TowersConfig.examples()[0]
    with pytest.raises(
        InputError, match=r"text.head, image.head: expected vectors of one width, got 6 and 5"
    ):
        TwoTowers(config.override("image.head.projection", 5))
    with pytest.raises(InputError, match=r"text.head: expected a head of vectors.* got 'masked'"):
        TwoTowers(config.override("text.head", "masked"))
    ours = TwoTowers(config)
    with pytest.raises(InputError, match="return_loss: expected a text for each image, got 2 texts and 3"):
        ours(torch.ones(2, 4).long(), torch.randn(3, 1, 12, 8), return_loss=True)
