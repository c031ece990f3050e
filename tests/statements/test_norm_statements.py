"""Statements of the five lecture texts (docs/seeds.md) about normalization and residual connections."""

import torch

from polyformer.core.ops.norms import BatchNormConfig, LayerNormConfig
from polyformer.models.presets import create_model


def test_a_normalized_vector_has_mean_zero_and_variance_one():
    torch.manual_seed(0)
    y = LayerNormConfig(eps=1e-12).build(768).double()(5 + 3 * torch.randn(1, 5, 768, dtype=torch.float64))
    torch.testing.assert_close(y.mean(-1), torch.zeros(1, 5, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones(1, 5, dtype=torch.float64))


def test_axes_of_the_two_norms():
    """Batch normalization: per channel over all tokens. Layer normalization: per token over all channels."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, dtype=torch.float64) * torch.arange(1, 7) + torch.arange(6)
    by_channel = BatchNormConfig(eps=1e-12).build(6).double().train()(x)
    by_token = LayerNormConfig(eps=1e-12).build(6).double()(x)
    assert by_channel.mean((0, 1)).abs().max() < 1e-12 < 1e-2 < by_channel.mean(-1).abs().max()
    assert by_token.mean(-1).abs().max() < 1e-12 < 1e-2 < by_token.mean((0, 1)).abs().max()


def test_statistics_of_small_batches_are_noisy():
    """The same token normalized in other batches: the deviation falls as one over the root of the batch."""
    torch.manual_seed(0)
    token, deviations = torch.randn(1, 1, 8), {}
    for rows in (2, 32, 512):
        norm = BatchNormConfig().build(8).train()
        batches = [torch.cat([token, torch.randn(rows - 1, 1, 8)]) for _ in range(60)]
        with torch.no_grad():
            deviations[rows] = float(torch.stack([norm(batch)[0, 0] for batch in batches]).std(0).mean())
    assert deviations[2] > 2 * deviations[32] > 4 * deviations[512]


def test_layer_norm_is_the_same_in_training_and_evaluation():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6)
    norm, batch = LayerNormConfig().build(6), BatchNormConfig().build(6)
    assert torch.equal(norm.train()(x), norm.eval()(x))
    assert not torch.allclose(batch.train()(x), batch.eval()(x), atol=1e-2)


def test_steps_of_a_recurrence_can_be_normalized():
    """A layer norm of a step needs no other step and no other row."""
    torch.manual_seed(0)
    norm, cell = LayerNormConfig().build(6), torch.nn.RNNCell(6, 6)
    x = torch.randn(9, 3, 6)

    def last(inputs: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(inputs.shape[1], 6)
        for step in inputs:
            state = norm(cell(step, state))
        return state

    torch.testing.assert_close(last(x)[1:2], last(x[:, 1:2]))


@torch.no_grad()
def test_a_deep_residual_network_can_be_a_shallow_one():
    """Additional pre-norm layers with sub-layers that return zeros change nothing."""
    ids, size = torch.arange(7).view(1, 7), {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2}
    shallow, deep = (
        create_model("decoder-tiny", num_hidden_layers=layers, intermediate_size=16, **size).double().eval()
        for layers in (2, 12)
    )
    stack = deep.decoder
    assert stack is not None
    for layer in list(stack.layers)[2:]:
        for name in ("attention.output", "feedforward.down"):
            for parameter in layer.get_submodule(name).parameters():
                torch.nn.init.zeros_(parameter)
    missing = deep.load_state_dict(shallow.state_dict(), strict=False)
    assert not missing.unexpected_keys
    torch.testing.assert_close(deep(ids).logits, shallow(ids).logits, rtol=1e-12, atol=1e-12)
