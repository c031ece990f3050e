"""Early exits beside their equations, a token at a time; their training; and one pass beside many."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stepwise import stepwise
from torch import Tensor

from polyformer.attention.positions.rope import RopeConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import ModelInputs
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.exit_loss import ExitLoss
from polyformer.models.checkpoints import convert
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.generation import GenerationConfig
from polyformer.nn.depth import full_depth, recorded_depths
from polyformer.nn.depth.exits import Exits, ExitsConfig, set_threshold
from polyformer.nn.depth.exits.rules import ExitTrajectory, OracleConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import HeadInput
from polyformer.nn.stack import AttentionConfig, LayerCall, StackConfig

VOCAB, LAYERS = 23, 4
RULES = ["softmax", "saturation", "classifier", "multinomial", "classifier(target=exit)"]


def stack(**depth: Any) -> StackConfig:
    """Four layers with exits, without dropout."""
    return StackConfig(
        num_hidden_layers=LAYERS,
        attention=AttentionConfig(num_attention_heads=2),
        feedforward=DenseConfig(intermediate_size=20),
        position=RopeConfig(),
        dropout=0.0,
        block=StackConfig.from_dict({"block": "pre"}).block,
        depth=ExitsConfig.from_dict({"kind": "exits", **depth}) if depth else ExitsConfig(),
    )


def model(pair: bool = False, **depth: Any) -> Transformer:
    """Of random weights large enough that tokens differ."""
    torch.manual_seed(0)
    decoder = stack(**depth)
    encoder = StackConfig(num_hidden_layers=1, attention=decoder.attention, dropout=0.0) if pair else None
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=16, encoder=encoder, decoder=decoder, special=SpecialTokens(bos=1)
    )
    result = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return result


def exits(of: Transformer) -> Exits:
    assert of.decoder is not None
    assert isinstance(of.decoder.depth, Exits)
    return of.decoder.depth


def ids(rows: int = 3, length: int = 10) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def confidence(of: Transformer, rule: str, n: int, states: list[Tensor], t: int) -> float:
    """Of token t of one row at exit n, by the equations of the rules; states: [T, E] after every layer."""
    own, h = exits(of), states[n][t]
    if rule == "softmax":
        logits = own.exits[n](h) @ of.tokens.weight.T
        first, second = logits.softmax(-1).sort(descending=True).values[:2]
        return float(first - second)
    if rule == "saturation":
        below = states[n - 1][t] if n else states[-1][t]
        return max(0.0, float(h @ below / (h.norm() * below.norm())))
    if rule.startswith("classifier"):
        return float((h @ own.rule.weight[n] + own.rule.bias[n]).sigmoid())
    return float(own.rule.choice(states[0][t]).softmax(-1)[: n + 1].sum())


@torch.no_grad()
def by_equation(of: Transformer, rule: str, tokens: Tensor, threshold: float) -> tuple[Tensor, list[int]]:
    """What the head reads [T, E], and how many layers each token of one row took."""
    side, own, length = of.decoder, exits(of), tokens.shape[1]
    pos, context = torch.arange(length), Context(length, length, causal=True)
    x = of.decoder_embedding(of.tokens(tokens), side.position, pos, ModelInputs(tokens))
    embedded, states, depths = x[0], [], [0] * length
    read: list[Tensor | None] = [None] * length
    for n, layer in enumerate(side.sequence):
        after, _ = layer(x, LayerCall(context, side.position))
        alive = torch.tensor([vector is None for vector in read])
        x = torch.where(alive[None, :, None], after, x)
        states.append(x[0])
        for t in range(length):
            if read[t] is not None:
                continue
            depths[t] = n + 1
            if n == LAYERS - 1:
                read[t] = side.final_norm(x[0, t])
            elif confidence(of, rule, n, [*states, embedded], t) >= threshold:
                read[t] = own.exits[n](x[0, t])
    return torch.stack([vector for vector in read if vector is not None]), depths


@pytest.mark.parametrize("rule", RULES)
def test_a_token_leaves_where_the_rule_says(rule: str):
    threshold = {"softmax": 0.15, "saturation": 0.9}.get(rule, 0.5)
    of, tokens = model(rule=rule, threshold=threshold), ids()
    with recorded_depths() as depths:
        hidden = of(tokens).last_hidden_state
    for row, (own, read) in enumerate(zip(depths[0], hidden)):
        right, layers = by_equation(of, rule, tokens[row : row + 1], threshold)
        assert own.tolist() == layers
        torch.testing.assert_close(read, right)
    assert len(depths[0].unique()) > 1, "tokens of one depth show nothing"


@pytest.mark.parametrize("rule", RULES)
def test_a_token_at_a_time_is_one_pass(rule: str):
    of, tokens = model(rule=rule, threshold=0.4), ids()
    whole = of(tokens).last_hidden_state
    torch.testing.assert_close(stepwise(of, tokens), whole)


@pytest.mark.parametrize("rule", ["sequence", "classifier"])
def test_a_pair_writes_as_in_one_pass(rule: str):
    of, source, target = model(pair=True, rule=rule, threshold=0.45), ids(), ids(length=6)
    with recorded_depths() as depths:
        whole = of(source, decoder_input_ids=target).last_hidden_state
    torch.testing.assert_close(stepwise(of, target, source), whole)
    if rule == "sequence":
        assert all(len(row.unique()) == 1 for row in depths[-1]), "a sequence leaves as a whole"


def test_the_threshold_falls_with_the_position():
    of = model(threshold=0.8, decay=4.0, decay_length=100)
    own = exits(of).threshold(0, torch.tensor([0, 25, 100]))
    right = [0.9 * 0.8 + 0.1 * math.exp(-4 * t / 100) for t in (0, 25, 100)]
    torch.testing.assert_close(own, torch.tensor(right))


def test_at_threshold_one_a_converted_model_is_what_it_was():
    plain = model()
    plain = convert(plain, depth="fixed")[0]
    added, _ = convert(plain, depth="exits(translation=linear, alone=true)")
    tokens = ids()
    torch.testing.assert_close(added(tokens).logits, plain(tokens).logits)
    own = exits(added)
    assert all(torch.equal(exit.norm.weight, plain.decoder.final_norm.weight) for exit in own.exits)
    learning = [name for name, parameter in added.named_parameters() if parameter.requires_grad]
    assert learning
    assert all(name.startswith("decoder.depth.") for name in learning)


@pytest.mark.parametrize("weights", ["layer", "equal"])
def test_the_aligned_loss_is_the_mean_over_the_exits(weights: str):
    of, tokens = model(loss_weights=weights, rule_loss=0.0), ids()
    output = of.train()(tokens, labels=tokens)
    side, own = of.decoder, exits(of)
    states = of(tokens, output_hidden_states=True).hidden_states[1:-1]
    reads = [exit(h) for exit, h in zip(own.exits, states)] + [output.last_hidden_state]
    losses = [
        F.cross_entropy((read @ of.tokens.weight.T)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        for read in reads
    ]
    shares = range(1, LAYERS + 1) if weights == "layer" else [1] * LAYERS
    right = sum(share * loss for share, loss in zip(shares, losses)) / sum(shares)
    torch.testing.assert_close(output.loss, right)
    assert side is not None


def course(of: Transformer, tokens: Tensor) -> tuple[ExitTrajectory, Tensor, Tensor]:
    """A text in training, log-likelihoods and rightness [B, T, exits] of it."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    with full_depth():
        hidden = of(tokens, output_hidden_states=True).hidden_states[1:]
    reads = [exit(h) for exit, h in zip(exits(of).exits, hidden)] + [hidden[-1]]
    logits = torch.stack([read @ of.tokens.weight.T for read in reads], 2)
    at = labels.clamp_min(0)[:, :, None, None].expand(-1, -1, len(reads), 1)
    likelihood = logits.log_softmax(-1).gather(-1, at).squeeze(-1)
    judge = ExitLoss(of.head, HeadInput(reads[-1], None, of.tokens.weight), labels)
    right = logits.argmax(-1) == labels.unsqueeze(-1)
    mask = (labels >= 0).unsqueeze(-1)
    return ExitTrajectory(list(hidden), reads, judge), likelihood * mask, (right & mask).double()


@pytest.mark.parametrize("by", ["likelihood", "correctness"])
@pytest.mark.parametrize("sigma", [0.0, 3.0])
def test_oracles_are_the_papers(by: str, sigma: float):
    of, tokens = model(), ids(rows=2, length=7)
    text, likelihood, right = course(of, tokens)
    oracle = OracleConfig.from_dict({"by": by, "sigma": sigma, "penalty": 0.05})
    gains = (likelihood if by == "likelihood" else right).detach()
    for b in range(2):
        for t in range(7):
            scores = []
            for n in range(LAYERS):
                near = [
                    float(gains[b, s, n]) * (math.exp(-((t - s) ** 2) / sigma) if sigma else float(s == t))
                    for s in range(7)
                ]
                scores.append(sum(near) - 0.05 * n)
            assert int(oracle.exits(text)[b, t]) == max(range(LAYERS), key=scores.__getitem__)
        whole = gains[b].sum(0) - 0.05 * torch.arange(LAYERS)
        assert int(oracle.exits(text, per_sequence=True)[b]) == int(whole.argmax())


@torch.no_grad()
def test_the_geometric_classifiers_loss_is_that_of_its_distribution():
    of, tokens = model(rule="classifier(target=exit)"), ids(rows=2, length=7)
    text, _, _ = course(of, tokens)
    rule = exits(of).rule
    best = rule.config.oracle.exits(text)
    total, count = 0.0, 0
    for b in range(2):
        for t in range(6):
            chi = [float(rule.logits(n, text.states[n][b, t]).sigmoid()) for n in range(LAYERS - 1)]
            q = [math.prod(1 - c for c in chi[:n]) * (chi[n] if n < LAYERS - 1 else 1) for n in range(LAYERS)]
            assert math.isclose(sum(q), 1)
            total, count = total - math.log(q[int(best[b, t])]), count + 1
    assert math.isclose(float(rule.loss(text)), total / count, rel_tol=1e-6)


@pytest.mark.parametrize(("target", "reaches"), [("consistency", False), ("exit", True)])
def test_the_loss_of_consistency_trains_only_the_units(target: str, reaches: bool):
    """CALM trains the classifier of a frozen model; the loss of Elbayad et al. is one of the whole model."""
    of, tokens = model(rule=f"classifier(target={target})"), ids()
    text, _, _ = course(of, tokens)
    loss = exits(of).rule.loss(text)
    trunk, rule = of.decoder.layers.parameters(), exits(of).rule.parameters()  # type: ignore[union-attr]
    grads = torch.autograd.grad(loss, [*trunk, *rule], allow_unused=True)
    moved = [grad is not None and bool(grad.any()) for grad in grads]
    assert moved[-2:] == [True, True]
    assert any(moved[:-2]) == reaches


def test_mixed_training_draws_every_exit_and_others_see_the_copies():
    of, tokens = model(training="mixed"), ids(rows=8, length=12)
    with recorded_depths() as depths:
        output = of.train()(tokens, labels=tokens)
    assert depths[0].unique().tolist() == [1, 2, 3, 4]
    assert set(output.losses) == {"prediction"}


def test_generation_reads_the_prompt_with_all_layers_and_exits_after_it():
    of = model(rule="saturation", threshold=0.0).float()
    with recorded_depths() as depths:
        of.generate(ids(rows=2, length=5), config=GenerationConfig(max_new_tokens=6))
    assert depths[0].unique().tolist() == [LAYERS]
    assert all(depth.unique().tolist() == [1] for depth in depths[1:])


def test_one_threshold_for_each_exit():
    of, tokens = model(rule="saturation"), ids()
    set_threshold(of, [1.0, 0.0, 1.0])
    with recorded_depths() as depths:
        of(tokens)
    assert depths[0].unique().tolist() == [2]
    with pytest.raises(InputError, match=r"threshold.*3 exits"):
        set_threshold(of, [0.5])


WRONG = {
    "layers": {"layers": [2, 1]},
    "depth.layers": {"layers": [4]},
    "threshold": {"threshold": 1.5},
    "depth.threshold": {"threshold": [0.5]},
    "translation": {"translation": "cubic"},
    "decay": {"decay": -1.0},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused_by_name(name: str):
    with pytest.raises(InputError, match=rf"\b{name}"):
        model(**WRONG[name])


def test_an_encoder_has_no_exits():
    with pytest.raises(InputError, match=r"encoder\.depth"):
        ModelConfig(vocab_size=VOCAB, hidden_size=16, encoder=stack())
