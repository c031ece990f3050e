"""The loss of preferences against the equation of Rafailov et al. 2023 (7), with numbers computed by hand."""

import math
from typing import Any

import pytest
import torch

from polyformer.core.errors import InputError
from polyformer.training.objectives import preference_loss, preference_margins


def pairs(*values: float) -> Any:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


def test_the_loss_is_that_of_a_pair_computed_by_hand():
    """log pi -2 and -5, log ref -3 and -4: 0.5 ((-2 + 3) - (-5 + 4)) = 1, -log sigmoid(1) = 0.3132616875."""
    margins = preference_margins(pairs(-2.0, -5.0), pairs(-3.0, -4.0), beta=0.5)
    assert margins.item() == pytest.approx(1.0, abs=1e-15)
    assert preference_loss(margins).item() == pytest.approx(0.31326168751822286, abs=1e-15)


def test_the_loss_is_a_mean_over_pairs():
    """Margins 1 and -2: (0.3132616875 + 2.1269280110) / 2."""
    policy = [torch.tensor([-2.0, -9.0]).double(), torch.tensor([-5.0, -5.0]).double()]
    reference = [torch.tensor([-3.0, -6.0]).double(), torch.tensor([-4.0, -6.0]).double()]
    loss = preference_loss(preference_margins(policy, reference, 0.5))
    assert loss.item() == pytest.approx((0.31326168751822286 + 2.1269280110429727) / 2, abs=1e-14)


def test_a_vanishing_beta_and_an_unchanged_model_give_log_2():
    far = pairs(-2.0, -500.0), pairs(-300.0, -4.0)
    assert preference_loss(preference_margins(*far, beta=1e-12)).item() == pytest.approx(
        math.log(2), abs=1e-9
    )
    same = preference_margins(pairs(-2.0, -5.0), pairs(-2.0, -5.0), beta=7.0)
    assert preference_loss(same).item() == pytest.approx(math.log(2), abs=1e-15)


def test_the_gradient_is_that_of_the_paper():
    """The gradient of log pi(y_w) is -beta sigmoid(-margin), of log pi(y_l) the opposite (section 4)."""
    policy = [torch.tensor([-2.0, -9.0, 0.5]).double().requires_grad_() for _ in range(2)]
    policy[1] = (policy[1] * 1.5 - 1).detach().requires_grad_()
    reference = [torch.tensor([-3.0, -6.0, 1.0]).double().requires_grad_() for _ in range(2)]
    beta = 0.3
    margins = preference_margins(policy, reference, beta)
    gradients = torch.autograd.grad(3 * preference_loss(margins), policy)
    expected = -beta * torch.sigmoid(-margins.detach())
    torch.testing.assert_close(gradients[0], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients[1], -expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda a, b: preference_loss(preference_margins([a, b], reference, beta)), policy
    )
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(preference_loss(preference_margins(policy, reference, beta)), reference)


def test_far_margins_do_not_overflow():
    assert preference_loss(torch.tensor([-1e4, 1e4])).item() == pytest.approx(5e3)


def test_wrong_shapes_and_betas_are_refused():
    with pytest.raises(InputError, match=r"policy, reference: expected .* of one shape \[pairs\]"):
        preference_margins([torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(InputError, match="beta: "):
        preference_margins(pairs(0.0, 0.0), pairs(0.0, 0.0), beta=0.0)
