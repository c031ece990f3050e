"""A policy that plays one episode, an observation per call."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.architectures.policy import Policy
from polyformer.training.rl.environments import SpaceSizes, rescale_action, space_sizes
from polyformer.training.rl.policies import Source


class PolicyPlayer:
    """A function from the observations [S] of one episode, in order, to actions in `space`.

    Actions are sampled with `generator`, or the most probable without a generator. attentions: of the last
    step, [H, M + 1] per layer, if `attends` is set.
    """

    def __init__(
        self, policy: Policy, space: Any, generator: torch.Generator | None = None, attends: bool = False
    ):
        self.policy, self.space, self.generator, self.attends = policy, space, generator, attends
        self.state = None
        self.attentions: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def __call__(self, seen: np.ndarray) -> Any:
        """Return a choice, or a vector within its bounds."""
        device = next(self.policy.parameters()).device
        observation = torch.as_tensor(seen, dtype=torch.float32, device=device)[None, None]
        output = self.policy(observation, state=self.state, output_attentions=self.attends)
        self.state = output.state
        self.attentions = tuple(layer[0, :, 0] for layer in output.attentions or ())
        logits = output.logits[0, 0].float().cpu()
        if not self.policy.config.continuous:
            drawn = self.generator is not None
            return int(
                torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
                if drawn
                else logits.argmax()
            )
        if self.generator is not None:
            noise = torch.randn(logits.shape, generator=self.generator)
            logits = logits + self.policy.log_deviations.exp().cpu() * noise
        return rescale_action(self.space, logits.numpy())


def source_of(policy: Policy, environment: Any) -> Source:
    """Return `policy` as a source of episodes with sampled actions; raises `InputError` if sizes differ."""
    config, has = policy.config, space_sizes(environment)
    reads = SpaceSizes(config.observation_size, config.num_actions, config.continuous)
    if has != reads:
        raise InputError(
            f"policies: a policy was trained on {reads}, and the environment has {has}; record it "
            "where it was trained, with the same --wrappers"
        )

    def source(generator: np.random.Generator) -> PolicyPlayer:
        seeded = torch.Generator().manual_seed(int(generator.integers(2**31)))
        return PolicyPlayer(policy, environment.action_space, seeded)

    return source
