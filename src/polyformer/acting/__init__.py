"""Environments: recording episodes in them, and trying there what has learnt from episodes."""
