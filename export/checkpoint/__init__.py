"""Checkpoints on disk: where their tensors are, and the parameters that they hold."""
