"""Decision Transformer, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import read_config  # noqa: E402
from families import same, shaken  # noqa: E402

import polyformer  # noqa: E402
from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.checkpoints.save import to_hub_tensors  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.model import TrajectoryConfig, TrajectoryTransformer  # noqa: E402

SIZES: dict[str, Any] = {
    "state_dim": 5,
    "act_dim": 3,
    "hidden_size": 12,
    "n_layer": 2,
    "n_head": 3,
    "max_ep_len": 30,
    "n_positions": 7,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"action_tanh": False, "n_inner": 20, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-3},
    {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_layer": 3, "n_head": 2},
]


def their_model(config: int, **options: Any) -> Any:
    torch.manual_seed(7)
    chosen = transformers.DecisionTransformerConfig(**{**SIZES, **CONFIGS[config], **options})
    return transformers.DecisionTransformerModel(chosen)


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_decision_transformer(config: int, side: str, tmp_path):
    theirs: Any = shaken(their_model(config, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path / "theirs")
    ours: Any = polyformer.from_pretrained(tmp_path / "theirs")
    inputs = trajectories(side)
    mask = inputs["attention_mask"]
    options = {"output_hidden_states": True, "output_attentions": True}
    mine, other = ours(**inputs, **options), theirs(**inputs, **options)
    compare(mine, other, mask)
    real = mask.bool().repeat_interleave(3, 1)
    for a, b in zip(mine.hidden_states, other.hidden_states, strict=True):
        same(a[real], b[real])
    for a, b in zip(mine.attentions, other.attentions, strict=True):
        same(a.transpose(1, 2)[real], b.transpose(1, 2)[real])
    compare_gradients(ours, mine, theirs, other, mask.bool())
    saved_and_read_again(ours, theirs, tmp_path)
    single = {name: item.float() if item.is_floating_point() else item for name, item in inputs.items()}
    with torch.no_grad():
        compare(ours.float()(**single), theirs.float()(**single), mask, 1e-5)


def compare_gradients(ours: Any, mine: Any, theirs: Any, other: Any, real: Tensor) -> None:
    """Of all that is predicted of real steps."""
    for item in (
        [mine.actions, mine.states, mine.returns],
        [other.action_preds, other.state_preds, other.return_preds],
    ):
        torch.stack([part[real].square().sum() for part in item]).sum().backward()
    actual = to_hub_tensors(
        FAMILIES["decision_transformer"],
        ours.config,
        "Model",
        {name: parameter.grad for name, parameter in ours.named_parameters()},
    )
    expected = {
        name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None
    }
    assert expected.keys() == actual.keys()
    for name, item in expected.items():
        same(actual[name], item)


def saved_and_read_again(ours: Any, theirs: Any, folder: Any) -> None:
    """Bitwise, in both formats; the unused table of tokens is theirs alone."""
    ours.save_pretrained(folder / "hub", format="hub")
    again = type(theirs).from_pretrained(folder / "hub", dtype=torch.float64).state_dict()
    for name, tensor in theirs.state_dict().items():
        assert name == "encoder.wte.weight" or torch.equal(again[name], tensor), name
    for form in ("hub", "polyformer"):
        ours.save_pretrained(folder / form, format=form)
        copy: Any = polyformer.from_pretrained(folder / form)
        assert isinstance(copy, TrajectoryTransformer)
        assert copy.config == ours.config
        for name, tensor in ours.state_dict().items():
            assert torch.equal(copy.state_dict()[name], tensor), name


def test_a_model_of_ours_has_no_table_of_positions(tmp_path):
    model = TrajectoryTransformer(TrajectoryConfig())
    with pytest.raises(InputError, match=r"decoder.position.kind: 'none' instead of 'learned'"):
        model.save_pretrained(tmp_path, format="hub")


def test_cross_attention_is_refused():
    with pytest.raises(InputError, match=r"config.json: add_cross_attention is True"):
        read_config(transformers.DecisionTransformerConfig(), add_cross_attention=True)


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
