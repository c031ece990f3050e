"""Agents: environments, recorded episodes, and reinforcement learning of policies.

gymnasium provides the environments, Minari the files of episodes, TorchRL the collector, the advantages and
the loss of PPO. A trial plays episodes with a trained model: a policy, or a model of recorded episodes that
receives a target return.
"""
