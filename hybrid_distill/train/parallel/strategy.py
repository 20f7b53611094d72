"""Spread a stage over the processes that train it. The loop knows this interface alone.

Checkpoints hold whole float32 tensors under the parameters' names, whatever the strategy, so that a run can resume with
another number of processes or another strategy. They are gathered, written and read one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

from accelerate import Accelerator
from torch import Tensor
from torch.optim import AdamW

from ..checkpoint import Content
from ..optimizer import STATE, make_adamw, optimizer_tensors, trainable
from ..stage import Stage


class Strategy(ABC):
    """A stage on its device and ready to train. Every process must call each method, in the same order."""

    stage: Stage
    """The stage as it trains: the given one, or a copy."""
    model: Any
    """Module that takes a batch: ``stage``, or a wrapper around it."""
    optimizer: Any

    @abstractmethod
    def __init__(self, stage: Stage, accelerator: Accelerator) -> None: ...

    @abstractmethod
    def weights(self) -> Content:
        """Return the trained parameters, in float32."""

    @abstractmethod
    def optimizer_tensors(self) -> Content:
        """Return AdamW's state, as ``exp_avg/NAME``, ``exp_avg_sq/NAME`` and ``step/NAME``."""

    @abstractmethod
    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `optimizer_tensors` returned; weights are loaded into a stage before it is spread."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; returns their norm before, over all processes,
        on the device."""

    @abstractmethod
    def unshard(self) -> None:
        """End the training: leave the trained parameters, whole, in the given stage on its device."""


def stage_adamw(stage: Stage) -> AdamW:
    """Make the optimizer of a stage's config, for the parameters as they are now."""
    config = stage.config
    return make_adamw(stage, learning_rate=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)


class Replicated(Strategy):
    """One process, or DDP: every process holds everything."""

    def __init__(self, stage: Stage, accelerator: Accelerator) -> None:
        self.stage, self._accelerator = stage, accelerator
        stage.place(accelerator.device)
        self.model, self.optimizer = accelerator.prepare(stage, stage_adamw(stage))

    def weights(self) -> Content:
        return {name: parameter.detach() for name, parameter in trainable(self.stage).items()}

    def optimizer_tensors(self) -> Content:
        return optimizer_tensors(self.stage, self.optimizer)

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        state = self.optimizer.optimizer.state
        for name, parameter in trainable(self.stage).items():
            for key in STATE:  # a fused optimizer counts its steps on the device
                state[parameter][key] = tensors[f"{key}/{name}"].to(parameter.device, copy=True)

    def clip_gradients(self, max_norm: float) -> Tensor:
        return cast(Tensor, self._accelerator.clip_grad_norm_(trainable(self.stage).values(), max_norm))

    def unshard(self) -> None:
        pass
