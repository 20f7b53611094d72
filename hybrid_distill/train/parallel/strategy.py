"""How a stage is spread over the processes that train it. The loop knows this interface alone.

Checkpoints hold whole float32 tensors under the parameters' names, whatever the strategy, so that a run can go on with
another number of processes or another strategy. They are put together, written and read one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

from accelerate import Accelerator
from torch import Tensor
from torch.optim import AdamW

from ..checkpoint import Content
from ..config import StageConfig
from ..optimizer import load_optimizer_tensors, make_adamw, optimizer_tensors, trainable
from ..stages import Stage


class Strategy(ABC):
    """A stage on its device and ready to train. Every process must call each method, in the same order."""

    stage: Stage
    """The stage as it trains, or a copy of the one that was handed over."""
    model: Any
    """What takes a batch: ``stage``, or what is wrapped around it."""
    optimizer: Any

    @abstractmethod
    def weights(self) -> Content:
        """Trained parameters, in float32."""

    @abstractmethod
    def optimizer_tensors(self) -> Content:
        """AdamW's state, as ``exp_avg/NAME``, ``exp_avg_sq/NAME`` and ``step/NAME``."""

    @abstractmethod
    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """The counterpart of `optimizer_tensors`; weights are loaded into a stage before it is spread."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients to a norm of at most ``max_norm``; their norm before, over all processes."""

    @abstractmethod
    def give_back(self) -> None:
        """End the training: the stage that was handed over has its trained parameters, whole, on its device."""


def stage_adamw(stage: Stage, config: StageConfig) -> AdamW:
    """The optimiser that a stage's config asks for, of the parameters as they are now."""
    rate, decay = config.learning_rate, config.weight_decay
    return make_adamw(stage, learning_rate=rate, betas=config.betas, weight_decay=decay)


class Replicated(Strategy):
    """One process, or DDP: every process holds everything."""

    def __init__(self, stage: Stage, config: StageConfig, accelerator: Accelerator) -> None:
        self.stage, self._accelerator = stage, accelerator
        stage.place(accelerator.device)
        self.model, self.optimizer = accelerator.prepare(stage, stage_adamw(stage, config))

    def weights(self) -> Content:
        return {name: parameter.detach() for name, parameter in trainable(self.stage).items()}

    def optimizer_tensors(self) -> Content:
        return optimizer_tensors(self.stage, self.optimizer)

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        load_optimizer_tensors(self.stage, self.optimizer, tensors)

    def clip_gradients(self, max_norm: float) -> float:
        return float(cast(Tensor, self._accelerator.clip_grad_norm_(trainable(self.stage).values(), max_norm)))

    def give_back(self) -> None:
        pass
