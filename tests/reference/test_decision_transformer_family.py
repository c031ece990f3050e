"""Decision Transformer, loaded from transformers' files and saved back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import back, compare_gradients, loaded, same, shaken, squares
from family_table import read_config, their_model
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.architectures import TrajectoryConfig, TrajectoryTransformer

transformers = pytest.importorskip("transformers")

CONFIGS: list[dict[str, Any]] = [
    {},
    {"action_tanh": False, "n_inner": 20, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-3},
    {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_layer": 3, "n_head": 2},
]


def trajectories(side: str = "right") -> dict[str, Tensor]:
    """Three of at most nine steps."""
    torch.manual_seed(1)
    order, lengths = torch.arange(9), torch.tensor([[9], [6], [2]])
    mask = order >= 9 - lengths if side == "left" else order < lengths
    sizes = {"states": 5, "actions": 3, "returns_to_go": 1}
    actual = {name: torch.randn(3, 9, size, dtype=torch.float64) for name, size in sizes.items()}
    return {**actual, "timesteps": torch.randint(30, (3, 9)), "attention_mask": mask.long()}


def compare(mine: Any, other: Any, mask: Tensor, tolerance: float = 1e-10) -> None:
    real = mask.bool()
    for name in ("actions", "states", "returns"):
        same(getattr(mine, name)[real], other[f"{name.removesuffix('s')}_preds"][real], tolerance)
    each = real.repeat_interleave(3, 1)
    same(mine.last_hidden_state[each], other.last_hidden_state[each], tolerance)


@pytest.mark.parametrize(("config", "side"), [(0, "left"), (1, "right"), (2, "left"), (2, "right")])
def test_decision_transformer(config: int, side: str, tmp_path: Path):
    options = {**CONFIGS[config], "attn_implementation": "eager"}
    theirs: Any = shaken(their_model("decision_transformer", "Model", **options))
    ours = loaded(theirs, tmp_path / "theirs")
    assert isinstance(ours, TrajectoryTransformer)
    inputs = trajectories(side)
    mask = inputs["attention_mask"]
    asked = {"output_hidden_states": True, "output_attentions": True}
    mine, other = ours(**inputs, **asked), theirs(**inputs, **asked)
    compare(mine, other, mask)
    real, each = mask.bool(), mask.bool().repeat_interleave(3, 1)
    for a, b in zip(mine.hidden_states, other.hidden_states, strict=True):
        same(a[each], b[each])
    for a, b in zip(mine.attentions, other.attentions, strict=True):
        same(a.transpose(1, 2)[each], b.transpose(1, 2)[each])
    predicted = [mine.actions, mine.states, mine.returns]
    expected = [other.action_preds, other.state_preds, other.return_preds]
    losses = [squares([item[real] for item in items]) for items in (predicted, expected)]
    compare_gradients(ours, losses[0], theirs, losses[1])
    back(ours, theirs, tmp_path)
    single = {name: item.float() if item.is_floating_point() else item for name, item in inputs.items()}
    with torch.no_grad():
        compare(ours.float()(**single), theirs.float()(**single), mask, 1e-5)


def test_a_model_of_ours_has_no_table_of_positions(tmp_path):
    model = TrajectoryTransformer(TrajectoryConfig())
    with pytest.raises(InputError, match=r"decoder.position.kind: 'none' instead of 'learned'"):
        model.save_pretrained(tmp_path, format="hub")


def test_sizes():
    """Of the models published for Hopper: 11 numbers of state, 3 of action; theirs has a row for tokens."""
    theirs = transformers.DecisionTransformerConfig(state_dim=11, act_dim=3)
    with torch.device("meta"):
        models = (
            TrajectoryTransformer(read_config(theirs)),  # type: ignore[arg-type]
            transformers.DecisionTransformerModel(theirs),
        )
    ours, other = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert ours == other - 128 == 1_254_927
