"""Evaluation of a student and its teacher: retrieval, knowledge, perplexity, cache bytes."""

from .evaluate import EvalResult, evaluate

__all__ = ["EvalResult", "evaluate"]
