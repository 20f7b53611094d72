"""Training of a built student: stages, losses, the loop, checkpoints."""
