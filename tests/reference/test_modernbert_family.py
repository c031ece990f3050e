"""ModernBERT with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import Double, read_config  # noqa: E402
from encoders import HEADS, PROBLEMS, counts, verify_encoder  # noqa: E402
from families import same  # noqa: E402
from transformers.loss import loss_utils  # noqa: E402
from transformers.models.modernbert import modeling_modernbert  # noqa: E402

import polyformer  # noqa: E402
from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.checkpoints.save import find_family  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.presets import model_config  # noqa: E402

FULL, LOCAL = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "local_attention": 4,
    "attn_implementation": "eager",
}
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 50.0},
    LOCAL: {"rope_type": "default", "rope_theta": 7.0},
}
BIASED = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
CONFIGS: list[dict[str, Any]] = [
    {"rope_parameters": ROPES},
    {
        **BIASED,
        "layer_types": [LOCAL, FULL, FULL, LOCAL],
        "hidden_activation": "silu",
        "classifier_activation": "relu",
        "classifier_pooling": "mean",
        "tie_word_embeddings": False,
        "decoder_bias": False,
        "norm_eps": 1e-3,
        "pad_token_id": 3,
    },
    {"layer_types": [FULL] * 4, "rope_parameters": ROPES},
]
CASES = [
    *((head, config, "right", "one") for head in HEADS for config in range(3)),
    *((head, 1, "left", "one") for head in HEADS),  # with the mean: their first slot may be padding
    ("ForMaskedLM", 0, "left", "one"),
    *(("ForSequenceClassification", 0, "right", problem) for problem in PROBLEMS if problem != "one"),
]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    """Their angles and softmax in float64, and rotation and loss too, which cast to float32."""
    monkeypatch.setattr(modeling_modernbert, "torch", Exact())

    def rotated(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turn = modeling_modernbert.rotate_half
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotated)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForMaskedLM", exact_loss)


def exact_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """Theirs without its cast to float32."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Exact(Double):
    """With their other name of float32, too."""

    float = torch.float64


@pytest.mark.parametrize(("head", "config", "side", "problem"), CASES)
def test_every_class(head: str, config: int, side: str, problem: str, tmp_path):
    options = {**SIZES, **CONFIGS[config]}
    verify_encoder(f"ModernBert{head}", options, tmp_path, side=side, problem=problem)


def test_a_padded_batch_is_computed_without_its_padding(tmp_path):
    """Also long enough that windows and unpadding matter: rows of 40 and 9 tokens are what they are alone."""
    options = {**SIZES, **CONFIGS[0], "max_position_embeddings": 64}
    torch.manual_seed(5)
    theirs = transformers.ModernBertModel(transformers.ModernBertConfig(**options)).double().eval()
    theirs.save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    ids = torch.randint(3, 23, (2, 40))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        together = ours(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
        alone = theirs(ids[1:, :9]).last_hidden_state
    same(together[1:, :9], alone)


def test_older_names_of_options():
    """Files on the hub say the bases and which layers see all tokens in another way."""
    old = {"global_attn_every_n_layers": 2, "global_rope_theta": 50.0, "local_rope_theta": 7.0}
    old |= {name: SIZES[name] for name in ("num_hidden_layers", "local_attention")}
    config = FAMILIES["modernbert"].config(old, "ForMaskedLM")
    theirs = transformers.ModernBertConfig(**old)
    assert config == read_config(theirs, architectures=["ModernBertForMaskedLM"])
    assert config.encoder is not None
    assert config.encoder.position.to_dict()["bases"] == [50.0, 7.0]


@pytest.mark.parametrize(("preset", "millions"), [("modernbert-base", 149), ("modernbert-large", 395)])
def test_parameters(preset: str, millions: int):
    """`millions` is what the paper prints."""
    own, theirs = counts(preset, "ModernBertForMaskedLM")
    assert own == theirs
    assert abs(own / 1e6 - millions) < 2
    family, hub, task = find_family(model_config(preset))
    assert (family.model_type, task) == ("modernbert", "ForMaskedLM")
    assert family.config(hub, task) == model_config(preset)


def test_defaults():
    assert FAMILIES["modernbert"].config({}, "ForMaskedLM") == model_config("modernbert-base")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_types": ["full"] * 22}, "unknown layer_types 'full'"),
        ({"layer_types": [FULL]}, "config.json: layer_types has 1 layers, and num_hidden_layers 22"),
        ({"attention_dropout": 0.1}, "config.json: attention_dropout is 0.1, and only 0.0 is supported"),
        (
            {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0}}},
            "config.json: rope_type of full_attention is 'linear', and only 'default' is supported",
        ),
        ({"rope_parameters": {LOCAL: 3}}, "config.json: rope_parameters of sliding_attention is 3, expected"),
        ({"rope_scaling": {"rope_type": "strange"}}, "config.json: rope_type is 'strange', and only"),
        ({"classifier_pooling": "max"}, "unknown classifier_pooling 'max'"),
        ({"local_attention": "wide"}, "config.json: local_attention is 'wide', expected an integer"),
        ({"global_attn_every_n_layers": 0}, "config.json: global_attn_every_n_layers is 0, expected"),
    ],
)
def test_what_is_not_computed_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        FAMILIES["modernbert"].config(options, "ForSequenceClassification")
    assert str(caught.value).startswith(message), caught.value


def test_what_they_cannot_hold_is_named():
    config = model_config("modernbert-base")
    for path, value in (
        ("encoder.block.first_norm", True),
        ("encoder.position.bases", (7.0, 8.0)),
        ("encoder.attention.bias", ("query",)),
        ("encoder.dropout", 0.1),
    ):
        with pytest.raises(InputError, match=path):
            FAMILIES["modernbert"].hub_config(config.override(path, value))
