"""Distillation stages: the modules that accelerate and DeepSpeed wrap. Batch in, loss out.

A stage registers only the parts of the student that it trains or runs. It does not register the teacher, so that no
optimizer, checkpoint or sharding ever sees it.

Shapes here and in the stages: B batch, L length, S source length, H head, R recurrent heads of a layer, P head dim,
D model width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..data import Batch, cu_seqlens, pick_rows
from ..distributed import warn_of_emulation
from ..model.documents import packed_inputs
from ..model.layout import decoder_of
from ..model.modeling_hybrid import HybridForCausalLM
from ..student.dtypes import make_master_weights
from ..student.sharing import share_frozen_weights
from ..teacher import HeadSite, MixerCall, attention_sites, watch_calls
from .config import StageConfig
from .noise import remove_noise

Totals = Mapping[str, Tensor]
"""Denominators of a stage's losses over a whole step, by name (`Stage.totals`); if empty, the batch's own are used."""
Config = TypeVar("Config", bound=StageConfig)


class StageLoss(NamedTuple):
    """Loss of a batch, or a micro-batch's share of the loss of its step."""

    total: Tensor
    per_layer: dict[str, Tensor]
    """Losses by layer, ``layer.3`` and so on, detached; empty for a loss without layers."""


class Stage(nn.Module, ABC, Generic[Config]):
    """Stage of distillation: the parameters that it trains, and its loss on a batch.

    Making a stage freezes teacher and student, except for the parameters to train, which become float32. Without a
    teacher in memory, the batches contain its logits.
    """

    shardable = True
    """False if ZeRO-3 and FSDP2 cannot be used: they gather sharded weights only around calls of ``forward``."""
    entry = "forward"
    """Name of the method that is called on `parts`."""
    teacher_shardable = True
    """False if the student runs weights of the teacher, which then cannot be sharded."""
    teacher_is_sharded = False
    vocab_size: int | None = None
    """Vocabulary size of the tokenizer, for models that pad theirs."""

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel | None,
        config: Config,
    ) -> None:
        super().__init__()
        dtype = student.dtype if teacher is None else teacher.dtype
        self.config = config.with_precision(dtype.itemsize < 4)
        self.bf16 = self.config.precision == "bf16"
        """True to compute in bfloat16 where that is safe (autocast); weights and sums keep their dtype."""
        remove_noise(student)
        # In tuples, neither model becomes a submodule.
        self._student = (student,)
        self.teachers: tuple[PreTrainedModel, ...] = ()
        if teacher is not None:
            self.teachers = (teacher.eval(),)

    @property
    def student(self) -> HybridForCausalLM:
        return self._student[0]

    @property
    def teacher(self) -> PreTrainedModel:
        return self.teachers[0]

    def micro_batches(
        self,
        batch: Batch,
        size: int,
        seeds: Sequence[int],
    ) -> list[Batch]:
        """Split a process's rows of a step into parts of ``size`` rows, ready for `totals` and `forward`.

        ``seeds``, one per row, are for stages that draw random numbers: a row's numbers then depend neither on the
        split nor on the number of processes.
        """
        firsts = range(0, len(batch["mask"]), size)
        return [pick_rows(batch, slice(first, first + size)) for first in firsts]

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count the tokens of a micro-batch that the loss covers."""
        return batch["mask"].sum()

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Compute a micro-batch's contribution to the denominators of the losses; ``tokens`` is `n_tokens`.

        If `forward` gets the sums over all micro-batches and processes, the losses and gradients of the micro-batches
        add up to those of the whole step.
        """
        return {"tokens": self.n_tokens(batch)}

    def forward(self, batch: Batch, totals: Totals = MappingProxyType({})) -> StageLoss:
        """Return the loss of a batch, with a graph to the trained parameters; by default the batch is a whole step."""
        with self.autocast(batch):
            return self.loss(batch, totals)

    @abstractmethod
    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        """Compute the loss that `forward` returns."""

    @abstractmethod
    def parts(self) -> list[nn.Module]:
        """Return the modules of the student, one per layer, that run in sequence: FSDP2 gathers them one by one."""

    def compiled_length(self, seq_len: int) -> int | None:
        """Return the length of the rows that attention is compiled for; None if all rows have few lengths."""
        return None

    def whole_layers(self) -> list[nn.Module]:
        """Return the teacher's and the student's decoder layers that can be compiled, each as a whole.

        By default none: a layer may call the stage in its middle, or get rows of many lengths.
        """
        return []

    def autocast(self, batch: Batch) -> torch.autocast:
        device = batch["input_ids"].device
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)

    def place(self, device: torch.device) -> None:
        """Move student and teacher to a device; frozen weights that they share stay shared.

        With a sharded teacher, parts of the student that the stage does not run stay where they are.
        """
        if self.bf16:
            warn_of_emulation(device, f"--{self.config.name}.precision fp32")
        student: nn.Module = self.student
        if self.teacher_is_sharded:
            student = self
        for model in (student, *self.teachers):
            nn.Module.to(model, device)

    def train_only(self, chosen: Mapping[str, nn.Parameter]) -> None:
        """Freeze everything except the ``chosen`` parameters. Raises ValueError if there are none."""
        if not chosen:
            raise ValueError(
                "the student has nothing to train: its plan keeps every head, or its replaced heads have a window "
                f"alone and {self.config.name}.train is 'ssm', or {self.config.name}.lr-scale freezes all that it has; "
                f"pass --{self.config.name}.train mixer, or other multipliers."
            )
        # Everything first: the student may share chosen parameters with what is frozen.
        for model in (self.student, *self.teachers):
            model.requires_grad_(False)
        make_master_weights(chosen.values())


class TeacherForced(Stage[Config]):
    """Stage that compares layer by layer: each student layer gets the teacher's own input to that layer.

    The teacher runs once; hooks on its modules run the student's counterparts and record the losses. All weights
    outside the student's mixers are shared with the teacher. Layers that keep all their heads are skipped.
    """

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel,
        config: Config,
    ) -> None:
        super().__init__(student, teacher, config)
        share_frozen_weights(student, teacher)
        # Registered, unlike the student, whose other weights are the teacher's.
        self.mixers = nn.ModuleList(student.mixers())
        mixers = student.mixers()
        self._sites = [site for site in attention_sites(teacher) if mixers[site.layer].replaced]

    @abstractmethod
    def watched(self, site: HeadSite) -> nn.Module:
        """Return the teacher's module whose calls are repeated with the student's weights."""

    @abstractmethod
    def layer_loss(
        self,
        layer: int,
        call: MixerCall,
        batch: Batch,
        totals: Totals,
    ) -> Tensor:
        """Compare the student with one call of the watched module."""

    def parts(self) -> list[nn.Module]:
        return list(self.mixers)

    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        def compare(layer: int, call: MixerCall) -> Tensor:
            arguments = (layer, call, batch, totals)
            # The hook runs inside the teacher's forward, which records no graph.
            with torch.enable_grad():
                if self.config.gradient_checkpointing:
                    # The reentrant kind drops the graph if no input requires a gradient, and the
                    # teacher's do not.
                    return checkpoint(self.layer_loss, *arguments, use_reentrant=False)
                return self.layer_loss(*arguments)

        losses = self.run_teacher(batch, compare)
        total = torch.stack(list(losses.values())).sum()
        per_layer = {name: loss.detach() for name, loss in losses.items()}
        return StageLoss(total, per_layer)

    def run_teacher(
        self,
        batch: Batch,
        visit: Callable[[int, MixerCall], Tensor],
    ) -> dict[str, Tensor]:
        """Run the teacher on a batch; return the results of ``visit`` on each watched call, by layer name."""
        results: dict[str, Tensor] = {}

        def record(layer: int, call: MixerCall) -> None:
            results[f"layer.{layer}"] = visit(layer, call)

        with torch.no_grad(), ExitStack() as hooks:
            for site in self._sites:
                record_layer = partial(record, site.layer)
                hooks.enter_context(watch_calls(site, self.watched(site), record_layer))
            teacher_hidden(self.teacher, batch)
        return results


@torch.no_grad()
def teacher_hidden(teacher: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the teacher's last hidden states, [B, L, E], with the documents of a row kept separate."""
    packed = packed_inputs(
        batch["seq_idx"],
        teacher.dtype,
        teacher.config,
        cu_seqlens=cu_seqlens(batch),
    )
    decoder = decoder_of(teacher)
    return decoder(input_ids=batch["input_ids"], use_cache=False, **packed)[0]


def add_totals(parts: Iterable[Totals]) -> dict[str, Tensor]:
    """Sum the totals of all parts, in float64."""
    totals_of_parts = list(parts)
    sums: dict[str, Tensor] = {}
    for name in totals_of_parts[0]:
        # float32 counts tokens exactly only up to 2^24.
        values = [totals[name].double() for totals in totals_of_parts]
        sums[name] = torch.stack(values).sum()
    return sums


def mixer_parameters(student: HybridForCausalLM, train: str) -> dict[str, nn.Parameter]:
    """Select parameters in layers with replaced heads: of their recurrence (``ssm``), or of the whole ``mixer``."""
    chosen: dict[str, nn.Parameter] = {}
    for layer, mixer in enumerate(student.mixers()):
        if not mixer.replaced:
            continue
        trained: nn.Module = mixer
        if train == "ssm":
            if mixer.ssm is None:
                continue
            trained = mixer.ssm
        for name, parameter in trained.named_parameters():
            chosen[f"{layer}.{name}"] = parameter
    return chosen


def n_rows(mask_BL: Tensor) -> Tensor:
    """Count the rows, as a scalar on the mask's device: totals are summed over processes there."""
    return mask_BL.new_full((), len(mask_BL), dtype=torch.long)


def select_heads(t: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """Select heads along ``dim``, without the host-device sync that ``t[:, list(heads)]`` causes.

    Not the slices of `model.rows.pick_heads`: they are views, in whose layout a loss would be summed in another order.
    """
    index = torch.tensor(heads).to(t.device, non_blocking=True)
    return t.index_select(dim, index)
