"""Triton kernels for hybrid-distill. None is written yet: the package runs on its torch implementations.

This package imports torch and triton only, and never hybrid_distill. Its parent folder has no ``__init__.py``
on purpose: a package named ``kernels`` would shadow the Hugging Face library of that name.
"""

__all__: list[str] = []
