"""Mixture of experts: every token by the equation, the balance loss, and capacity that sees no future."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.layers import collect_auxiliary_losses
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import (
    AlternateFeedForwardConfig,
    DenseConfig,
    Experts,
    ExpertsConfig,
    GatedConfig,
    SeparableConvolutionConfig,
)
from polyformer.nn.feedforward.experts import balance_loss, within_capacity

SMALL = DenseConfig(intermediate_size=7)


CLAMPED = GatedConfig(intermediate_size=3, activation="quick_gelu", bias=True, clamp=0.3, up_offset=1.0)


def new_experts(**options: Any) -> Experts:
    torch.manual_seed(0)
    module = ExpertsConfig(**{"expert": SMALL, "experts": 4, **options}).build(5).double()
    if module.selection_bias is not None:
        module.selection_bias.normal_()
    return module


def by_token(module: Experts, x: Tensor) -> Tensor:
    """One token after the other, one expert after the other."""
    rows = [plain(module, token) for token in x.flatten(0, 1)]
    return torch.stack(rows).view_as(x)


def plain(module: Experts, x: Tensor) -> Tensor:
    """The equations of the router and of the experts for a token [E]."""
    config = module.config
    logits = F.linear(x, module.router.weight, module.router.bias)
    scores = logits.sigmoid() if config.scores == "sigmoid" else logits.exp() / logits.exp().sum()
    rank = scores.detach().clone() + (0 if module.selection_bias is None else module.selection_bias)
    size = config.experts // config.groups
    groups = [range(start, start + size) for start in range(0, config.experts, size)]
    groups.sort(key=lambda group: -float(rank[list(group)].sort().values[-config.group_top :].sum()))
    allowed = [expert for group in groups[: config.groups_used] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -float(rank[expert]))[: config.top_k]
    whole = scores[chosen].sum() if config.gates == "chosen" else 1.0
    y = sum(config.gate_scale * scores[e] / whole * module.experts[e](x) for e in chosen)
    if module.shared_expert is not None:
        gate = (
            1.0
            if module.shared_expert_gate is None
            else F.linear(x, module.shared_expert_gate.weight).sigmoid()
        )
        y = y + gate * module.shared_expert(x)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1, "gates": "all"},
        {"top_k": 4},
        {"top_k": 3, "gates": "all"},
        {"experts": 1, "top_k": 1},
        {"expert": CLAMPED, "router_bias": True},
        {"scores": "sigmoid", "gates": "all", "shared_expert": SMALL},
        {
            "experts": 6,
            "groups": 3,
            "groups_used": 1,
            "gates": "all",
            "gate_scale": 2.5,
            "shared_expert": CLAMPED,
        },
        {"scores": "sigmoid", "selection_bias": True, "shared_expert": SMALL, "shared_expert_gate": True},
        {"experts": 9, "groups": 3, "groups_used": 2, "group_top": 2, "selection_bias": True},
    ],
)
def test_the_equation(options: dict[str, Any]):
    """Grouped, dense and token by token: outputs and all gradients."""
    module, results = new_experts(**options), []
    for form in (module, module.forward_dense, lambda x: by_token(module, x)):
        torch.manual_seed(1)
        x = torch.randn(2, 9, 5, dtype=torch.float64).requires_grad_()
        y = form(x)
        results.append(
            (y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()], materialize_grads=True))
        )
    for outputs in results[:2]:
        for actual, expected in zip(outputs, results[2]):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_an_expert_without_tokens_has_a_gradient():
    """Of zeros: where processes share the work, every parameter must have one."""
    module = new_experts()
    with torch.no_grad():
        module.router.weight.zero_()[:2, 0] = 100.0
    module(torch.ones(1, 3, 5, dtype=torch.float64)).sum().backward()
    for index, expert in enumerate(module.experts):
        for parameter in expert.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) <= (index < 2)


def test_the_balance_loss():
    """Equations 4 to 6 of the Switch paper for one choice; 1 for equal loads, X where one takes all."""
    torch.manual_seed(2)
    probabilities, chosen = torch.rand(2, 6, 3).softmax(-1), torch.randint(3, (2, 6, 1))
    real = torch.ones(2, 6, dtype=torch.bool)
    shares = [float((chosen == e).float().mean()) * float(probabilities[..., e].mean()) for e in range(3)]
    assert float(balance_loss(probabilities, chosen, real)) == pytest.approx(3 * sum(shares))
    equal = torch.arange(6).view(1, 6, 1) % 3
    assert float(balance_loss(torch.full((1, 6, 3), 1 / 3), equal, real[:1])) == pytest.approx(1.0)
    each = torch.eye(3)[torch.zeros(1, 6, dtype=torch.long)]
    assert float(balance_loss(each, torch.zeros(1, 6, 1, dtype=torch.long), real[:1])) == pytest.approx(3.0)


def test_the_selection_bias_follows_the_load():
    """Once per backward pass, without padding: experts above the mean load lose the rate, others gain it."""
    module = new_experts(selection_bias=True, bias_rate=0.25, scores="sigmoid").train()
    assert module.selection_bias is not None
    before = torch.tensor([0.5, 0.25, 0.0, -8.0]).double()
    module.selection_bias.copy_(before)
    with torch.no_grad():
        module.router.weight.zero_()
    x, valid = torch.randn(1, 3, 5, dtype=torch.float64), torch.tensor([[False, True, True]])
    y = module(x, Context(3, 3, kv_valid=valid))
    assert torch.equal(module.selection_bias, before), "the choice of a pass has the bias from before"
    y.sum().backward()
    assert torch.equal(module.selection_bias, before + torch.tensor([-0.25, -0.25, 0.25, 0.25]))
    module.eval()(x).sum().backward()
    assert torch.equal(module.selection_bias, before + torch.tensor([-0.25, -0.25, 0.25, 0.25]))


def test_recomputed_activations_move_the_selection_bias_once():
    part = ExpertsConfig(expert=SMALL, experts=3, selection_bias=True, bias_rate=0.5)
    config = model_config("decoder-tiny", {"feedforward": part, "hidden_size": 16, "dropout": 0.0})
    model, ids, results = Transformer(config).train(), torch.arange(9).view(1, 9), []
    for recompute in (False, True):
        again = copy.deepcopy(model)
        assert again.decoder is not None
        again.decoder.recompute = recompute
        again(ids, labels=ids).loss.backward()
        results.append(torch.stack([bias for name, bias in again.named_buffers() if "selection" in name]))
    assert torch.equal(*results)
    assert results[0].abs().max() == 0.5


def test_padding_counts_nowhere():
    """Neither in the balance loss nor for capacity, whatever it holds."""
    module, outputs = new_experts(capacity=0.6).train(), []
    torch.manual_seed(3)
    x = torch.randn(1, 7, 5, dtype=torch.float64)
    for before, after in ((0, 0), (3, 0), (2, 4)):
        junk = [torch.randn(1, n, 5, dtype=torch.float64) for n in (before, after)]
        valid = torch.zeros(1, before + 7 + after, dtype=torch.bool)
        valid[:, before : before + 7] = True
        context = Context(valid.shape[1], valid.shape[1], kv_valid=valid)
        with collect_auxiliary_losses() as terms:
            y = module(torch.cat([junk[0], x, junk[1]], 1), context)
        assert not y[~valid].any()
        outputs.append((y[:, before : before + 7], terms["balance"]))
    for each in outputs[1:]:
        for actual, expected in zip(each, outputs[0]):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_capacity_is_a_share_of_the_past():
    """Of the first t tokens of a document that all choose one expert the first is taken alone."""
    chosen, real = torch.zeros(1, 6, 1, dtype=torch.long), torch.ones(1, 6, dtype=torch.bool)
    doc = torch.tensor([[0, 0, 0, 0, 5, 5]])
    assert within_capacity(chosen, 2, real, doc, 0.5).flatten().tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    turns = torch.tensor([0, 0, 1, 0, 1, 1]).view(1, 6, 1)
    assert within_capacity(turns, 2, real, None, 0.5).flatten().tolist() == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]


def test_capacity_sees_no_future_and_no_other_row():
    module = new_experts(capacity=0.5, top_k=1, gates="all").train()
    torch.manual_seed(4)
    x = torch.randn(3, 12, 5, dtype=torch.float64)
    whole = module(x)
    assert bool((whole == 0).all(-1).any()), "some tokens are dropped"
    torch.testing.assert_close(module(x[:, :7]), whole[:, :7], rtol=0, atol=1e-12)
    torch.testing.assert_close(module(x[1:2]), whole[1:2], rtol=0, atol=1e-12)
    assert not bool((module.eval()(x) == 0).all(-1).any()), "an evaluation drops nothing"


def test_jitter_is_of_training_alone():
    module, x = new_experts(jitter=0.5), torch.randn(2, 4, 5, dtype=torch.float64)
    assert not torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


def test_the_loss_of_a_model_has_the_balance():
    turns = AlternateFeedForwardConfig(feedforwards=(SMALL, ExpertsConfig(expert=SMALL, experts=3)))
    config = model_config("decoder-tiny", {"feedforward": turns, "hidden_size": 16, "dropout": 0.0})
    model, ids = Transformer(config).train(), torch.arange(8).view(1, 8)
    output = model(ids, labels=ids)
    assert output.losses is not None
    torch.testing.assert_close(output.loss.detach(), output.losses["prediction"] + output.losses["balance"])
    kinds = [type(layer.feedforward).__name__ for layer in model.decoder.layers]  # type: ignore[union-attr]
    assert kinds == ["Dense", "Experts"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "experts: expected 1 or more, got 0"),
        ({"top_k": 9}, "top_k: expected from 1 to the 8 experts, got 9"),
        ({"top_k": 0}, "top_k: expected from 1 to the 8 experts, got 0"),
        ({"top_k": 1}, "gates: a softmax over 1 chosen expert is always 1, .* use gates 'all'"),
        ({"experts": 7, "groups": 2}, "groups: expected a divisor of the 7 experts, got 2"),
        ({"groups": 2, "groups_used": 3}, "groups_used: expected at most the 2 groups, got 3"),
        ({"groups": 8, "groups_used": 1}, "groups_used: 1 groups have 1 experts, fewer than top_k 2"),
        ({"groups": 4, "group_top": 3}, "group_top: expected at most the 2 experts of a group, got 3"),
        ({"bias_rate": 0.1}, "bias_rate: expected 0 without selection_bias, got 0.1"),
        ({"shared_expert_gate": True}, "shared_expert_gate: expected False without shared_expert, got True"),
        (
            {"shared_expert": SeparableConvolutionConfig()},
            "shared_expert: 'separable_convolution' reads more than one token",
        ),
        ({"capacity": 0.0}, r"capacity: expected a number above 0, got 0\.0; null for no limit"),
        ({"balance": -1.0}, "balance: expected 0 or more, got -1.0"),
        ({"jitter": 1.0}, r"jitter: expected a number in \[0, 1\), got 1.0"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        ExpertsConfig(**options)
    with pytest.raises(InputError, match="feedforwards: expected 1 feed-forward or more, got none"):
        AlternateFeedForwardConfig(feedforwards=())
