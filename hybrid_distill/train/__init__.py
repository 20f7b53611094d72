"""Stages that turn a built student into a trained one: losses, stages, the loop, checkpoints."""
