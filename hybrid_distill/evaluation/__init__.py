"""Evaluation of a student and its teacher: retrieval, knowledge, perplexity, cache bytes."""

from .evaluate import evaluate
from .result import EvalResult

__all__ = ["EvalResult", "evaluate"]
