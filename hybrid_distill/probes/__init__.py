"""Synthetic tasks: each example asks a model one question."""

from .probe import Example, Probe, SeededProbe, queries_of
