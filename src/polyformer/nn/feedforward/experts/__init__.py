"""Mixture of experts: `routing` chooses experts and gates, `experts` sends the tokens to them."""

from polyformer.nn.feedforward.experts.experts import Experts, ExpertsConfig

__all__ = ["Experts", "ExpertsConfig"]
