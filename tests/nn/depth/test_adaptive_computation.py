"""Adaptive computation time beside its equations, a token at a time."""

from typing import Any

import pytest
import torch
from stepwise import stepwise
from torch import Tensor

import polyformer
from polyformer.attention.patterns import Window
from polyformer.attention.positions.added import StepSinusoidConfig
from polyformer.attention.positions.by_distance import AlibiConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import ModelInputs
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.nn.depth import recorded_depths
from polyformer.nn.depth.act import ACT, ACTConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.stack import AttentionConfig, LayerCall, Stack, StackConfig

VOCAB = 19


def stack(**options: Any) -> StackConfig:
    """One side of a Universal Transformer."""
    settings = {
        "num_hidden_layers": 5,
        "num_hidden_groups": 1,
        "attention": AttentionConfig(num_attention_heads=2),
        "feedforward": DenseConfig(intermediate_size=20),
        "position": StepSinusoidConfig(),
        "dropout": 0.0,
        "depth": ACTConfig(),
    }
    return StackConfig(**settings | options)


def act(side: Stack | None) -> ACT:
    assert side is not None
    assert isinstance(side.depth, ACT)
    return side.depth


def model(**sides: StackConfig) -> Transformer:
    """Of random weights, whose halting units tell tokens apart."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=VOCAB, hidden_size=16, special=SpecialTokens(bos=1), **sides)
    result = Transformer(config).double().eval()
    for name in sides:
        torch.nn.init.normal_(act(getattr(result, name)).weight, std=1.5)
    return result


def ids(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def by_equation(of: Transformer, name: str, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [1, T, E], N [T] and R [T] for tokens [1, T]: every step of every token is computed."""
    side, embedding = getattr(of, name), getattr(of, f"{name}_embedding")
    unit, length = act(side), tokens.shape[1]
    pos, context = torch.arange(length), Context(length, length, causal=name == "decoder")
    s = embedding(of.tokens(tokens), side.position, pos, ModelInputs(tokens))
    states, probabilities, spent = [], [], torch.zeros(length)
    for n, layer in enumerate(side.sequence):
        after, _ = layer(side.position.embed(s, pos, n) if n else s, LayerCall(context, side.position))
        halted = spent >= 1 - unit.config.epsilon
        s = torch.where(halted[None, :, None], s, after)
        p = (s[0] @ unit.weight + unit.bias).sigmoid()
        spent = spent + p.detach() * ~halted
        states.append(s[0])
        probabilities.append(p)
    outputs, steps, remainders = [], [], []
    for t in range(length):
        p = [step[t] for step in probabilities]
        reached = [n for n in range(len(p)) if sum(p[: n + 1]) >= 1 - unit.config.epsilon]
        last = min([*reached, len(p) - 1])
        remainder = 1 - sum(p[:last], torch.zeros(()))
        outputs.append(sum(p[n] * states[n][t] for n in range(last)) + remainder * states[last][t])
        steps.append(last + 1)
        remainders.append(remainder)
    y = side.final_norm(torch.stack(outputs).unsqueeze(0))
    return y, torch.tensor(steps), torch.stack(remainders)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_output_steps_and_ponder_cost_are_the_equations(name: str):
    of, tokens = model(**{name: stack()}), ids()
    with recorded_depths() as depths:
        output = of.train()(tokens, labels=tokens)
    outputs, steps, remainders = zip(*(by_equation(of, name, row.unsqueeze(0)) for row in tokens))
    torch.testing.assert_close(output.last_hidden_state, torch.cat(outputs))
    assert depths[0].equal(torch.stack(steps))
    assert len(depths[0].unique()) > 1, "tokens of one depth show nothing"
    ponder = 0.01 * (depths[0] + torch.stack(remainders)).mean()
    torch.testing.assert_close(output.losses["ponder"], ponder)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_gradients_are_those_of_the_equations(name: str):
    of, tokens = model(**{name: stack()}), ids(rows=1)
    parameters = dict(of.named_parameters())
    hidden = of.train()(tokens).last_hidden_state
    weights = torch.randn_like(hidden)
    exact, _, _ = by_equation(of, name, tokens)
    grads, expected = (
        torch.autograd.grad((y * weights).sum(), list(parameters.values()), allow_unused=True)
        for y in (hidden, exact)
    )
    for parameter, grad, right in zip(parameters, grads, expected, strict=True):
        assert (grad is None) == (right is None), parameter
        if grad is not None:
            torch.testing.assert_close(grad, right)
    unit = list(parameters).index(f"{name}.depth.weight")
    assert grads[unit].abs().max() > 0


def test_the_ponder_cost_has_the_gradient_of_the_remainder():
    of, tokens = model(encoder=stack()), ids(rows=1)
    unit = act(of.encoder)
    output = of.train()(tokens, labels=tokens)
    _, _, remainders = by_equation(of, "encoder", tokens)
    (right,) = torch.autograd.grad(0.01 * remainders.mean(), unit.weight)
    alone = of(tokens, labels=tokens)
    unit.config = ACTConfig(ponder_loss=0.0)
    without = of(tokens, labels=tokens)
    (with_cost,) = torch.autograd.grad(alone.loss, unit.weight)
    (plain,) = torch.autograd.grad(without.loss, unit.weight)
    torch.testing.assert_close(with_cost - plain, right)
    assert output.loss > without.loss


@pytest.mark.parametrize("options", [{}, {"position": AlibiConfig()}, {"pattern": Window(3)}], ids=str)
def test_leaving_the_computation_changes_nothing(options: dict[str, Any]):
    attention = AttentionConfig(num_attention_heads=2)
    if "pattern" in options:
        attention = attention.with_value(options.pop("pattern"), "attention")
    of, tokens = model(decoder=stack(attention=attention, **options)), ids()
    fast = of(tokens).last_hidden_state
    for layer in of.decoder.layers:
        layer.can_skip_queries = False
    torch.testing.assert_close(fast, of(tokens).last_hidden_state)


def test_padding_does_not_ponder():
    of, tokens = model(encoder=stack()), ids()
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    with recorded_depths() as depths:
        padded = of(tokens, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(padded[0, :5], of(tokens[:1, :5]).last_hidden_state[0])
    assert not depths[0][0, 5:].any()


@pytest.mark.parametrize("memory", [False, True])
def test_a_token_at_a_time_is_one_pass(memory: bool):
    options = {"memory": RecurrentConfig(length=20), "position": AlibiConfig()} if memory else {}
    of, tokens = model(decoder=stack(**options)), ids()
    whole = of(tokens).last_hidden_state
    torch.testing.assert_close(stepwise(of, tokens), whole)


def test_a_pair_writes_as_in_one_pass():
    of, source, target = model(encoder=stack(), decoder=stack()), ids(), ids(length=6)
    whole = of(source, decoder_input_ids=target).last_hidden_state
    torch.testing.assert_close(stepwise(of, target, source), whole)


def test_tokens_that_halt_cost_nothing_more():
    of, tokens = model(encoder=stack()), ids()
    unit = act(of.encoder)
    torch.nn.init.constant_(unit.bias, 50.0)
    torch.nn.init.zeros_(unit.weight)
    read = []
    feedforward = of.encoder.layers[0].feedforward
    feedforward.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0].shape[:2].numel()))
    of(tokens)
    assert read == [tokens.numel()]
    read.clear()
    torch.nn.init.normal_(unit.weight, std=1.5)
    torch.nn.init.zeros_(unit.bias)
    with recorded_depths() as depths:
        of(tokens)
    assert sum(read) == int(depths[0].sum()), "tokens of all rows are computed without padding"


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"ponder_loss": -1.0}, {"halting_bias": float("nan")}])
def test_wrong_options_are_refused_by_name(wrong: dict[str, float]):
    with pytest.raises(InputError, match=next(iter(wrong))):
        ACTConfig(**wrong)


@pytest.mark.parametrize("part", [{"block": "reversible"}, {"layerdrop": 0.1}])
def test_parts_that_need_all_tokens_in_every_layer_are_refused(part: dict[str, Any]):
    with pytest.raises(InputError, match=f"depth.*{next(iter(part))}"):
        StackConfig.from_dict({"depth": "act", **part})


def test_gradients_are_finite_in_float16_with_padding():
    """Padding, which takes no step, has zeros for a state, and the head norms them."""
    model = polyformer.create_model("encoder-tiny", depth="act", head="masked").half().train()
    ids, mask = torch.randint(5, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 4:] = 0
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
