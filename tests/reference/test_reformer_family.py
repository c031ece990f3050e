"""Reformer as a decoder, loaded from transformers' files and saved back.

Its masks are -1e9 and -1e5 where ours are minus infinity, which is the same after the softmax. Its tables of
positions are in float32 whatever the model's type; not here.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from polyformer.attention import LSHConfig
from polyformer.checkpoints import FAMILIES
from polyformer.core.errors import InputError
from polyformer.model import Transformer
from polyformer.presets import model_config

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")

from decoders import exact_loss  # noqa: E402
from families import Inputs, compare_gradients, same, shaken, texts, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "attention_head_size": 5,
    "feed_forward_size": 20,
    "is_decoder": True,
    "axial_pos_shape": [4, 6],
    "axial_pos_embds_dim": [4, 8],
    "max_position_embeddings": 24,
    "attn_layers": ["local", "lsh"],
    "num_buckets": 4,
    "use_cache": False,
    "local_attn_chunk_length": 12,
    "lsh_attn_chunk_length": 12,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"attn_layers": ["local", "local", "local"], "local_attn_chunk_length": 4, "hidden_act": "gelu"},
    {"attn_layers": ["local", "local"], "local_attn_chunk_length": 2, "local_num_chunks_before": 2},
    {"attn_layers": ["lsh", "lsh"], "axial_pos_embds": False, "lsh_num_chunks_before": 2, "num_hashes": 3},
    {
        "attn_layers": ["lsh", "local", "lsh"],
        "axial_pos_embds_dim": [3, 9],
        "num_buckets": [2, 4],
        "chunk_size_feed_forward": 1,
        "layer_norm_eps": 1e-5,
    },
]
BIAS = ("lm_head.bias",)
"""Theirs reads it nowhere."""


class Positions(modeling.AxialPositionEmbeddings):  # type: ignore[misc, name-defined]
    """Theirs in the type of all else."""

    def __init__(self, config: Any):
        super().__init__(config)
        kind = torch.get_default_dtype()
        self.weights = torch.nn.ParameterList([tensor.detach().to(kind) for tensor in self.weights])


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "AxialPositionEmbeddings", Positions)


def config_of(**options: Any) -> Any:
    return transformers.ReformerConfig(**{**SIZES, **options})


def labels_of(inputs: Inputs) -> Inputs:
    return {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_the_language_model(config: int, tmp_path: Path):
    """Texts of several chunks for local layers, of at most one for LSH."""
    inputs = texts(23, (11, 8, 3))
    theirs = transformers.ReformerModelWithLMHead(config_of(**CONFIGS[config]))
    verify(theirs, inputs, tmp_path, dead=BIAS, hidden=False)


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_loss_and_gradients(config: int, tmp_path: Path):
    """Theirs has them in training alone, for texts as long as the grid of positions."""
    shape = {
        "axial_pos_shape": [3, 4],
        "max_position_embeddings": 12,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    }
    theirs: Any = shaken(transformers.ReformerModelWithLMHead(config_of(**{**CONFIGS[config], **shape})))
    theirs.save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    theirs.loss_function = exact_loss
    inputs = texts(23, (12, 12))
    mine, other = (item.train()(**inputs, **labels_of(inputs)) for item in (ours, theirs))
    same(mine.loss, other.loss)
    compare_gradients(ours, mine.loss, theirs, other.loss, BIAS)


def test_the_trunk(tmp_path: Path):
    """Its output is both streams side by side."""
    ours = verify(transformers.ReformerModel(config_of()), texts(23), tmp_path, hidden=False)
    assert ours(**texts(23)).last_hidden_state.shape == (3, 11, 24)


def test_steps_are_one_pass(tmp_path: Path):
    """Ours by its state, and theirs without any."""
    theirs: Any = shaken(transformers.ReformerModelWithLMHead(config_of()))
    theirs.save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    ids = texts(23, (11, 11))["input_ids"]
    whole, state, actual = theirs(input_ids=ids).logits, None, []
    for chunk in ids.split([4, 1, 3, 3], 1):
        output = ours(chunk, state=state, use_cache=True)
        state = output.state
        actual.append(output.logits)
    same(torch.cat(actual, 1), whole)


def test_long_texts_are_hashed(tmp_path: Path):
    """Beyond one chunk a token sees the first chunk and its buckets; loading hashes alike each time."""
    theirs: Any = shaken(
        transformers.ReformerModelWithLMHead(
            config_of(attn_layers=["lsh"], lsh_attn_chunk_length=4, lsh_num_chunks_before=1, num_buckets=2)
        )
    )
    theirs.save_pretrained(tmp_path)
    ours, again = polyformer.from_pretrained(tmp_path), polyformer.from_pretrained(tmp_path)
    ids = texts(23, (24, 24))["input_ids"]
    same(ours(ids).logits[:, :4], theirs(input_ids=ids[:, :4]).logits)
    assert torch.equal(ours(ids).logits, again(ids).logits)
    weights = ours(ids, output_attentions=True).attentions
    assert weights is not None
    assert int((weights[0] > 0).sum(-1).max()) < 23


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"is_decoder": False}, "is_decoder"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"lsh_attention_probs_dropout_prob": 0.1}, "lsh_attention_probs_dropout_prob"),
    ({"local_num_chunks_after": 1}, "local_num_chunks_after"),
    ({"attn_layers": ["other"]}, "attn_layers"),
    ({"axial_pos_shape": [2, 3, 4]}, "axial_pos_shape"),
    ({"axial_pos_embds_dim": [4, 4]}, "widths"),
]


@pytest.mark.parametrize(("options", "name"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(options: dict[str, Any], name: str):
    with pytest.raises(InputError, match=name):
        Transformer(FAMILIES["reformer"].config({**SIZES, **options}, "ModelWithLMHead"))


def test_buckets_are_kept_as_they_were_given():
    family = FAMILIES["reformer"]
    for option, buckets in (([2, 4], 8), (6, 6), (None, 4)):
        config = family.config({**SIZES, "num_buckets": option}, "ModelWithLMHead")
        assert config.decoder is not None
        mechanism = config.decoder.attention.mechanism.at(1)
        assert isinstance(mechanism, LSHConfig)
        assert mechanism.buckets == buckets
        assert family.hub_config(config)[0]["num_buckets"] == option


PUBLISHED: dict[str, dict[str, Any]] = {
    "reformer-small": {"axial_pos_shape": [512, 1024], "num_attention_heads": 2},
    "reformer-enwik8": {
        "axial_pos_shape": [128, 512],
        "axial_pos_embds_dim": [256, 768],
        "hidden_size": 1024,
        "vocab_size": 258,
        "num_attention_heads": 8,
        "attention_head_size": 128,
        "feed_forward_size": 4096,
        "attn_layers": ["local", "local", "lsh", "local"] * 3,
    },
}


@pytest.mark.parametrize(("name", "millions"), [("reformer-small", 3), ("reformer-enwik8", 149)])
def test_parameters_of_the_published_sizes(name: str, millions: int):
    with torch.device("meta"):
        ours = Transformer(model_config(name))
        theirs = transformers.ReformerModelWithLMHead(
            transformers.ReformerConfig(is_decoder=True, **PUBLISHED[name])
        )
    own, other = (sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs))
    assert own == other - theirs.config.vocab_size  # a bias that theirs never reads
    assert round(own / 1e6) == millions
