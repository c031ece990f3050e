"""The longformer presets are transformers' Longformer with the same weights; the numbers of its paper."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention import Marked, PerLayer, Window
from polyformer.model import Transformer
from polyformer.presets import create_model, model_config

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.longformer.modeling_longformer")

SIZES = {"vocab_size": 23, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 20}  # fmt: skip
POSITIONS, PAD = 40, 1
LAYER = {"attention.self.query": "attention.query", "attention.self.key": "attention.key",
         "attention.self.value": "attention.value", "attention.output.dense": "attention.output",
         "attention.self.query_global": "attention.global_attention.query",
         "attention.self.key_global": "attention.global_attention.key",
         "attention.self.value_global": "attention.global_attention.value",
         "attention.output.LayerNorm": "block.norms.0", "intermediate.dense": "feedforward.up",
         "output.dense": "feedforward.down", "output.LayerNorm": "block.norms.1"}  # fmt: skip
HEAD = {"lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm", "lm_head": "head"}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs casts the scores to float32 for the softmax whatever the model's type; not here."""
    functional = modeling.nn.functional
    plain = functional.softmax

    def softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return plain(scores, dim=dim)

    fake = type("functional", (), {**vars(functional), "softmax": staticmethod(softmax)})
    monkeypatch.setattr(modeling.nn, "functional", fake)


def ours_from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or their gradients, under our names; the positions that their padding shifts by two go."""
    names = {"longformer.embeddings.word_embeddings": "tokens",
             "longformer.embeddings.LayerNorm": "encoder_embedding.norm",
             "longformer.embeddings.position_embeddings": "encoder.position.tables.0",
             "longformer.embeddings.token_type_embeddings": "encoder_embedding.types", **HEAD}  # fmt: skip
    for i in range(SIZES["num_hidden_layers"]):
        names |= {
            f"longformer.encoder.layer.{i}.{old}": f"encoder.layers.{i}.{new}" for old, new in LAYER.items()
        }
    found = {}
    for old, new in names.items():
        for kind in ("weight", "bias"):
            if f"{old}.{kind}" in theirs:
                table = theirs[f"{old}.{kind}"]
                found[f"{new}.{kind}"] = table[PAD + 1 :] if "position" in old else table
    return found


def pair(windows: tuple[int, int]) -> tuple[Transformer, torch.nn.Module]:
    """Ours and theirs in float64; `windows` as they count them, both sides together."""
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        **SIZES, attention_window=list(windows), max_position_embeddings=POSITIONS + PAD + 1,
        type_vocab_size=1, pad_token_id=PAD, layer_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.LongformerForMaskedLM(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    pattern = PerLayer(tuple(Window(window // 2) | Marked() for window in windows))
    options: dict[str, Any] = {**SIZES, "max_position_embeddings": POSITIONS, "attention": pattern}
    ours = Transformer(model_config("longformer-tiny", options)).double().eval()
    ours.load_state_dict(ours_from_theirs(dict(theirs.state_dict())))
    return ours, theirs


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


MASKS = {
    "whole": [],
    "right": [slice(14, None), slice(3, None), slice(0, 0)],
    "left": [slice(0, 4), slice(0, 0), slice(0, 9)],
}
GLOBAL = {
    "none": [[], [], []],
    "first": [[0], [0], [0]],
    "different": [[1, 5, 12], [], [9, 10]],
    "one-row": [[], [0, 2], []],
}


@pytest.mark.parametrize("length", [17, 24])
@pytest.mark.parametrize("windows", [(4, 8), (8, 4)])
@pytest.mark.parametrize("padding", list(MASKS))
@pytest.mark.parametrize("marks", list(GLOBAL))
def test_outputs_and_gradients(length: int, windows: tuple[int, int], padding: str, marks: str):
    """Lengths that they pad to a multiple of the window and those that they do not; marks differ by row."""
    ours, theirs = pair(windows)
    torch.manual_seed(1)
    ids = torch.randint(2, 23, (3, length))
    mask = torch.ones_like(ids)
    for row, where in enumerate(MASKS[padding]):
        mask[row, where] = 0
    chosen = torch.zeros_like(ids)
    for row, slots in enumerate(GLOBAL[marks]):
        chosen[row, slots] = 1
    chosen = chosen * mask
    real = mask.bool()
    given = {
        "input_ids": ids.masked_fill(~real, PAD),
        "attention_mask": mask,
        "global_attention_mask": chosen,
    }
    mine = ours(**given, output_hidden_states=True)
    other = theirs(**given, output_hidden_states=True)
    for a, b in zip(mine.hidden_states, other.hidden_states, strict=True):
        same(a[real], b[real])
    same(mine.logits[real], other.logits[real])
    weight = torch.randn_like(other.logits[real])
    (mine.logits[real] * weight).sum().backward()
    (other.logits[real] * weight).sum().backward()
    expected = ours_from_theirs(
        {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    )
    for name, parameter in ours.named_parameters():
        if not chosen.any() and "global_attention" in name:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None, name
            same(parameter.grad, expected[name])


def test_attention_weights_of_global_tokens():
    """Theirs come in pieces: a window's columns, and a table of the global rows."""
    ours, theirs = pair((4, 8))
    torch.manual_seed(1)
    ids, chosen = torch.randint(2, 23, (1, 16)), torch.zeros(1, 16, dtype=torch.long)
    chosen[0, [3, 7]] = 1
    mine = ours(ids, global_attention_mask=chosen, output_attentions=True).attentions
    other = theirs(input_ids=ids, global_attention_mask=chosen, output_attentions=True).global_attentions
    for a, b in zip(mine, other, strict=True):
        same(a[0, :, [3, 7]], b[0].mT)


def counted(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_of_the_published_model():
    """allenai/longformer-base-4096: 50265 tokens, one type, 4098 positions of which padding takes two."""
    with torch.device("meta"):
        config = transformers.LongformerConfig(
            vocab_size=50265, max_position_embeddings=4098, type_vocab_size=1, attention_window=[512] * 12
        )
        theirs = transformers.LongformerForMaskedLM(config)
        pooled = transformers.LongformerModel(config)
        ours = create_model("longformer-base")
    assert counted(pooled) == 148_659_456  # what the checkpoint holds, with a pooler and without a head
    assert counted(ours) == counted(theirs) - 2 * 768 == 148_709_721
    assert sum(name.endswith("global_attention.query.weight") for name, _ in ours.named_parameters()) == 12


def test_windows_and_dilation_of_the_decoder():
    """Windows grow upwards; only in the upper layers two heads skip keys (section 4.1)."""
    torch.manual_seed(0)
    model = create_model(
        "longformer-decoder-small", num_attention_heads=8, hidden_size=32, vocab_size=50
    ).eval()
    length = 400
    seen = model(torch.randint(50, (1, length)), output_attentions=True).attentions
    for weights, (reach, dilation) in zip(seen, [(31, 1), (63, 1), (127, 2), (127, 3)], strict=True):
        last = weights[0, :, -1].flip(-1)  # by distance, for the last query
        distances = [(head > 0).nonzero().flatten().tolist() for head in last]
        far = list(range(0, reach * dilation + 1, dilation))
        assert distances == [far] * 2 + [list(range(reach + 1))] * 6
