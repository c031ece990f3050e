"""Policies in environments, by TorchRL: our models as its modules, collection of steps, and updates by PPO.

TorchRL provides the reinforcement learning (collector, advantages, loss), gymnasium the environments.
"""
