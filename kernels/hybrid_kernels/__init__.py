"""Triton kernels: the recurrence of SSM heads, its convolution, its decoding step, the distillation loss.

`ssd.ssd`, `conv.causal_conv`, `step.ssd_step` and `loss.distillation_loss` are what callers use; `ssd_forward` and
`ssd_backward` are the two passes. Import the modules: this file imports none of them, because all but the loss need
triton. They import torch and triton only, never hybrid_distill. Their parent folder has no ``__init__.py`` on purpose:
a package named ``kernels`` would shadow the Hugging Face library of that name.
"""

__all__: list[str] = []
