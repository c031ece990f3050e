"""Policies in environments, by TorchRL: our model as its modules, steps collected, updates by PPO.

The reinforcement learning is TorchRL's (collector, advantages, loss), the environments are gymnasium's.
"""
