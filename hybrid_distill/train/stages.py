"""The stages of distillation. A stage is the module that accelerate and DeepSpeed wrap: batch in, loss out.

A stage registers only what it trains or runs as the student; the teacher stays outside, so that no optimiser,
checkpoint or sharding ever sees it.

Shapes: B batch, L length, S source length, H head, R recurrent heads of a layer, P head dim, D model width,
V vocabulary.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..data import Batch, TaughtBatch, on_device, pick_rows
from ..model.layout import decoder_of
from ..model.modeling_hybrid import HybridForCausalLM, finish_logits, finishes_logits, packed_inputs
from ..student.build import share_frozen_weights, unshare_weights
from ..teacher import AttentionSite, attention_sites
from .config import AlignConfig, DistillConfig, LongConfig, MatrixConfig, OnPolicyConfig, StageConfig
from .losses import (
    IGNORE,
    TopK,
    distillation_loss,
    frobenius_loss,
    fused_distillation_loss,
    fused_top_k_loss,
    l2_norm_loss,
    next_token_labels,
    normalised_mse,
    power,
)

LAYER_LOSSES = {"l2": l2_norm_loss, "nmse": normalised_mse}

Totals = Mapping[str, Tensor]
"""Denominators of a stage's losses over a whole step, by name (`Stage.totals`); empty for those of the batch itself."""


class StageLoss(NamedTuple):
    """Loss of a batch, or the share of a micro-batch in the loss of the step it is a part of."""

    total: Tensor
    per_layer: dict[str, Tensor]
    """``layer.3`` and so on, detached; empty where the loss has no layers."""


def add_totals(parts: Iterable[Totals]) -> dict[str, Tensor]:
    """The totals of all parts together, in float64."""
    found = list(parts)
    return {name: torch.stack([part[name].double() for part in found]).sum() for name in found[0]}


class Stage(nn.Module, ABC):
    """One stage of distillation: what it trains, and its loss on a batch.

    Making a stage freezes teacher and student, but for the parameters it trains, which become float32.
    """

    bf16 = False
    """Compute in bfloat16 where that is safe (autocast); weights and sums stay as they are."""
    divisible = True
    """Whether ZeRO-3 and FSDP2 may divide the weights: they put them together only around calls of ``forward``."""
    entry = "forward"
    """The method by which `parts` are called."""
    teacher_divisible = True
    """Whether `fsdp.with_divided_teacher` may be used: not where the student runs weights of the teacher."""
    teacher_is_divided = False

    def __init__(self, student: HybridForCausalLM, teacher: PreTrainedModel | None) -> None:
        super().__init__()
        # A tuple: neither becomes a submodule.
        self._models: tuple[Any, ...] = (student,) if teacher is None else (student, teacher.eval())

    @property
    def student(self) -> HybridForCausalLM:
        return self._models[0]

    @property
    def teachers(self) -> tuple[PreTrainedModel, ...]:
        """The teacher, or nothing where there is none in memory: batches then bring along what it says."""
        return self._models[1:]

    @property
    def teacher(self) -> PreTrainedModel:
        return self._models[1]

    def micro_batches(self, batch: Batch, size: int, seeds: Sequence[int]) -> list[Batch]:
        """Cut a process's rows of a step into parts of ``size`` rows, ready for `totals` and `forward`.

        ``seeds``, one a row, are for stages that draw random numbers: what is drawn for a row then depends neither on
        the cut nor on the number of processes.
        """
        return [pick_rows(batch, slice(first, first + size)) for first in range(0, len(batch["mask"]), size)]

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count the tokens of a micro-batch that are judged."""
        return batch["mask"].sum()

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Measure what a micro-batch adds to the denominators of the losses; ``tokens`` is `n_tokens`.

        When `forward` gets their sums over all micro-batches and processes, losses and gradients of the micro-batches
        add up to those of the whole step.
        """
        return {"tokens": self.n_tokens(batch)}

    def forward(self, batch: Batch, totals: Totals = MappingProxyType({})) -> StageLoss:
        """Loss of a batch, with a graph to the parameters that the stage trains; by default the batch is whole."""
        with self._autocast(batch):
            return self.loss(batch, totals)

    @abstractmethod
    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        """What `forward` returns."""

    def _autocast(self, batch: Batch) -> torch.autocast:
        return torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=self.bf16)

    @abstractmethod
    def parts(self) -> list[nn.Module]:
        """Modules of the student, one a layer, that run one after the other: FSDP2 puts together one at a time."""

    def place(self, device: torch.device) -> None:
        """Move student and teacher to a device; frozen weights that they share stay shared. Beside a divided teacher,
        what the stage does not run of the student stays where it is.
        """
        for model in (self, self.teacher) if self.teacher_is_divided else self._models:
            nn.Module.to(model, device)

    def _train_only(self, chosen: Mapping[str, nn.Parameter]) -> None:
        if not chosen:
            raise ValueError("the student has nothing to train: its plan keeps every head.")
        for model in self._models:
            model.requires_grad_(False)
        for parameter in chosen.values():
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()


class _TeacherForced(Stage):
    """Stages that compare layer by layer: each student layer gets the teacher's own input to that layer.

    The teacher runs once; hooks on its modules run the student's counterpart and note the loss. All weights
    outside the student's mixers are the teacher's own. Layers that keep all their heads are left out.
    """

    def __init__(
        self, student: HybridForCausalLM, teacher: PreTrainedModel, *, recompute: bool = False
    ) -> None:
        super().__init__(student, teacher)
        share_frozen_weights(student, teacher)
        self.mixers = nn.ModuleList(student.mixers())
        self.recompute = recompute
        self._sites = [site for site in attention_sites(teacher) if student.mixers()[site.layer].recurrent]

    @abstractmethod
    def _watched(self, site: AttentionSite) -> nn.Module:
        """The teacher's module whose call is repeated with the student's weights."""

    @abstractmethod
    def _layer_loss(self, layer: int, call: _Call, batch: Batch, totals: Totals) -> Tensor:
        """The student's loss, given what went into and came out of the watched module."""

    def parts(self) -> list[nn.Module]:
        return list(self.mixers)

    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        def compare(layer: int, call: _Call) -> Tensor:
            with torch.enable_grad():
                return self._run(self._layer_loss, layer, call, batch, totals)

        losses = self._run_teacher(batch, compare)
        per_layer = {name: loss.detach() for name, loss in losses.items()}
        return StageLoss(torch.stack(list(losses.values())).sum(), per_layer)

    def _run_teacher(self, batch: Batch, visit: Callable[[int, _Call], Tensor]) -> dict[str, Tensor]:
        """Run the teacher on a batch; what ``visit`` returns of each layer's watched call, by the layer's name."""
        found: dict[str, Tensor] = {}
        with torch.no_grad(), self._hooks(visit, found):
            decoder_of(self.teacher)(
                input_ids=batch["input_ids"],
                use_cache=False,
                **packed_inputs(batch["seq_idx"], self.teacher.dtype, self.teacher.config),
            )
        return found

    @contextmanager
    def _hooks(self, visit: Callable[[int, _Call], Tensor], found: dict[str, Tensor]) -> Iterator[None]:
        def watch(site: AttentionSite) -> Iterator[Any]:
            heads: list[Tensor] = []

            def before_o_proj(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                heads[:] = [args[0].unflatten(-1, (site.n_heads, site.head_dim))]

            def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                call = _Call(args, kwargs, output if isinstance(output, tuple) else (output,), heads[0])
                found[f"layer.{site.layer}"] = visit(site.layer, call)

            yield site.o_proj.register_forward_pre_hook(before_o_proj)
            yield self._watched(site).register_forward_hook(after, with_kwargs=True)

        with ExitStack() as hooks:
            for site in self._sites:
                for handle in watch(site):
                    hooks.callback(handle.remove)
            yield

    def _run(self, loss: Callable[..., Tensor], *args: Any) -> Tensor:
        return checkpoint(loss, *args, use_reentrant=False) if self.recompute else loss(*args)


class _Call(NamedTuple):
    """One call of a watched module of the teacher."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: tuple[Any, ...]
    heads_BLHP: Tensor
    """What the output projection of this layer's attention got."""

    @property
    def hidden_BLD(self) -> Tensor:
        return self.args[0] if self.args else self.kwargs["hidden_states"]


class LayerAlignment(_TeacherForced):
    """Each student layer must do with the teacher's input what the teacher's layer does (arXiv 2408.10189).

    ``target`` is compared where it arises, by hooks on the modules (the last of the ``hidden_states`` that
    transformers returns has been through the final norm):

    * ``mixer``: output of the attention module, projected;
    * ``layer``: output of the decoder layer, MLP and residual included;
    * ``head``: output of every recurrent head before the projection, so that heads can be exchanged one by
    one.

    ``loss`` is ``l2`` (mean over tokens of the error's L2 norm) or ``nmse`` (squared error over the target's
    square, each summed over tokens); the total is the sum over layers. ``train`` is ``ssm`` or ``mixer``; with
    ``ssm`` a kept head goes on contributing exactly what it did.
    """

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel,
        *,
        target: str = "mixer",
        loss: str = "l2",
        train: str = "ssm",
        recompute: bool = False,
    ) -> None:
        super().__init__(student, teacher, recompute=recompute)
        if target == "head" and train != "ssm":
            raise ValueError(
                f"train is {train!r}; target 'head' compares recurrent heads alone: use train='ssm'."
            )
        self.target, self._loss, self._compare = target, loss, LAYER_LOSSES[loss]
        self.entry = "heads" if target == "head" else "forward"
        self.teacher_divisible = target != "layer"
        self._train_only(mixer_parameters(student, train))

    def _watched(self, site: AttentionSite) -> nn.Module:
        return site.block if self.target == "layer" else site.module

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """As `Stage.totals`; with ``nmse`` also the power of each layer's target, for which the teacher runs."""
        totals = super().totals(batch)
        if self._loss == "nmse":
            with self._autocast(batch):
                totals |= self._run_teacher(batch, lambda *of_layer: power(self._target(*of_layer), batch["mask"]))
        return totals

    def _layer_loss(self, layer: int, call: _Call, batch: Batch, totals: Totals) -> Tensor:
        total = totals.get("tokens" if self._loss == "l2" else f"layer.{layer}")
        pred, target = self._output(layer, call, batch["seq_idx"]), self._target(layer, call)
        return self._compare(pred, target, batch["mask"], total)

    def _target(self, layer: int, call: _Call) -> Tensor:
        return self._recurrent(layer, call.heads_BLHP) if self.target == "head" else call.output[0]

    def _output(self, layer: int, call: _Call, seq_idx_BL: Tensor) -> Tensor:
        mixer = self.student.mixers()[layer]
        if self.target == "head":
            return self._recurrent(layer, mixer.heads(*call.args, **call.kwargs, seq_idx=seq_idx_BL))
        module = mixer if self.target == "mixer" else self.student.model.layers[layer]
        output = module(*call.args, **call.kwargs, seq_idx=seq_idx_BL)
        return output[0] if isinstance(output, tuple) else output

    def _recurrent(self, layer: int, heads_BLHP: Tensor) -> Tensor:
        recurrent = torch.tensor(self.student.mixers()[layer].recurrent, device=heads_BLHP.device)
        return heads_BLHP.index_select(2, recurrent)


class MatrixAlignment(_TeacherForced):
    """Mixing matrices of the recurrent heads against the teacher's attention maps (arXiv 2408.10189).

    Sum over layers of the mean over rows and heads of the Frobenius norm. Trains what the matrices are made
    of: B, C, the decay, their convolution and D. Raises ValueError unless the teacher runs eager attention,
    the only one that shows its maps.
    """

    divisible = False

    def __init__(
        self, student: HybridForCausalLM, teacher: PreTrainedModel, *, recompute: bool = False
    ) -> None:
        implementation = teacher.config._attn_implementation
        if implementation != "eager":
            raise ValueError(
                f"the matrix stage needs attention maps, which {implementation!r} attention does not give; "
                "load the teacher with --teacher.attn-implementation eager."
            )
        super().__init__(student, teacher, recompute=recompute)
        parameters = mixer_parameters(student, "ssm").items()
        unused = ("x_proj", "z_proj")
        self._train_only({name: p for name, p in parameters if not any(part in name for part in unused)})

    def _watched(self, site: AttentionSite) -> nn.Module:
        return site.module

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """As `Stage.totals`, and the number of rows."""
        return super().totals(batch) | {"rows": _n_rows(batch["mask"])}

    def _layer_loss(self, layer: int, call: _Call, batch: Batch, totals: Totals) -> Tensor:
        mixer = self.student.mixers()[layer]
        mixing_BRLS = mixer.mixing_matrices(call.hidden_BLD, batch["seq_idx"])
        maps_BRLS = call.output[1][:, list(mixer.recurrent)]
        return frobenius_loss(mixing_BRLS, maps_BRLS, batch["mask"], totals.get("rows"))


class EndToEnd(Stage):
    """The student must predict what the teacher predicts; see `distillation_loss` for the loss's options.

    ``train`` is ``all``, ``mixer`` (kept and recurrent heads, output projections) or ``ssm``. ``vocab_size``
    is the tokenizer's, for models that pad their vocabulary. ``fused`` never holds the logits of all tokens, where
    output embeddings are plain products and whole in this process (not under ZeRO-3). ``segment_len`` is how many
    tokens the recurrent heads run over at a time (see `SSMHeads`).

    Without a teacher, each batch must be a `TaughtBatch`: the loss is then over the teacher's likeliest tokens and "any
    other". What was stored is for one ``temperature`` and ``vocab_size``, which must be these.
    """

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel | None,
        *,
        kind: str = "forward_kl",
        temperature: float = 1.0,
        beta: float = 0.5,
        hard_weight: float = 0.0,
        train: str = "all",
        vocab_size: int | None = None,
        recompute: bool = False,
        fused: bool = True,
        segment_len: int | None = None,
    ) -> None:
        super().__init__(student, teacher)
        unshare_weights(student)
        student.set_segment_len(segment_len)
        self.fused = fused
        self.model = student
        self.hard_weight = hard_weight
        self._options = {"kind": kind, "temperature": temperature, "beta": beta, "vocab_size": vocab_size}
        everything = dict(student.named_parameters())
        self._train_only(everything if train == "all" else mixer_parameters(student, train))
        if recompute:
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def parts(self) -> list[nn.Module]:
        return list(self.model.model.layers)

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """As `Stage.totals`, and the number of tokens that have a hard label."""
        labels_BL = next_token_labels(batch["input_ids"], batch["seq_idx"], batch["mask"])
        return super().totals(batch) | {"labels": (labels_BL != IGNORE).sum()}

    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        input_ids, seq_idx, mask = batch["input_ids"], batch["seq_idx"], batch["mask"]
        options = {**self._options, "n_tokens": totals.get("tokens"), "n_labels": totals.get("labels")}
        if self.hard_weight:
            options |= {"hard_weight": self.hard_weight, "labels_BL": next_token_labels(input_ids, seq_idx, mask)}
        theirs = teacher_hidden(self.teacher, batch) if self.teachers else _top_k(batch)
        ours_BLD = self.model.backbone_outputs(input_ids, seq_idx=seq_idx, use_cache=False)[0]
        compare: Any = self._to_top_k if isinstance(theirs, TopK) else self._to_teacher
        return StageLoss(compare(ours_BLD, theirs, mask, options), {})

    def _to_teacher(self, ours_BLD: Tensor, theirs_BLE: Tensor, mask_BL: Tensor, options: dict[str, Any]) -> Tensor:
        ours, theirs = (OutputEmbedding.of(model) for model in self._models)
        if self.fused and ours.is_product and theirs.is_product:
            inputs = ours_BLD, ours.module.weight, theirs_BLE, theirs.module.weight
            return fused_distillation_loss(*inputs, mask_BL, **options)
        with torch.no_grad():
            teacher_logits_BLV = theirs(theirs_BLE)
        return distillation_loss(ours(ours_BLD), teacher_logits_BLV, mask_BL, **options)

    def _to_top_k(self, ours_BLD: Tensor, theirs: TopK, mask_BL: Tensor, options: dict[str, Any]) -> Tensor:
        ours = OutputEmbedding.of(self.model)
        if self.fused and ours.is_product:
            return fused_top_k_loss(ours_BLD, ours.module.weight, theirs, mask_BL, **options)
        return distillation_loss(ours(ours_BLD), theirs, mask_BL, **options)


@torch.no_grad()
def teacher_hidden(teacher: PreTrainedModel, batch: Batch) -> Tensor:
    """The teacher's last hidden states, [B, L, E], every document of a row by itself."""
    packed = packed_inputs(batch["seq_idx"], teacher.dtype, teacher.config)
    return decoder_of(teacher)(input_ids=batch["input_ids"], use_cache=False, **packed)[0]


def _top_k(batch: Batch) -> TopK:
    assert "teacher_ids_BLK" in batch, "without a teacher, rows are data.logits.CachedLogitsDataset"
    taught = cast(TaughtBatch, batch)
    return TopK(taught["teacher_ids_BLK"], taught["teacher_log_probs_BLK"])


KINDS_OF_ROWS = ("given", "own")


class MixedBatch(Batch, total=False):
    """Rows as the data has them and rows that the student has written, of another length; either may be none."""

    own_input_ids: Tensor
    own_seq_idx: Tensor
    own_mask: Tensor


class OnPolicy(EndToEnd):
    """`EndToEnd`, but some rows are text that the student writes itself (arXiv 2306.13649).

    A row's first ``prompt_tokens``, from the last document that begins there, are what the student goes on from; the
    teacher then judges every token that it has written. ``share`` is the probability that it writes a row. The loss is
    the mean over the tokens of given rows and that over its own tokens, weighted by rows: a row counts as much when it
    is written as when it is given, however short the text. Likelihood on given text hides what goes wrong in
    generation; this stage trains on it.

    Each row draws from a seed of its own: however the step is cut, the same rows are written, and the same text but for
    rounding. In bfloat16 the logits depend on how many rows are computed together, enough to change a token.
    """

    divisible = False

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel,
        *,
        share: float = 0.5,
        prompt_tokens: int = 64,
        new_tokens: int = 64,
        sampling_temperature: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(student, teacher, **options)
        self.share, self.prompt_tokens, self.new_tokens = share, prompt_tokens, new_tokens
        self.sampling_temperature = sampling_temperature

    def micro_batches(self, batch: Batch, size: int, seeds: Sequence[int]) -> list[Batch]:
        """As `Stage.micro_batches`, with the student's text. Rows of a kind lie together, so that many are written at
        a time."""
        batch = on_device(batch, self.model.device)
        writes = [random.Random(seed).random() < self.share for seed in seeds]
        order = sorted(range(len(seeds)), key=lambda row: writes[row])
        return [self._mixed(batch, order[first : first + size], writes, seeds) for first in range(0, len(order), size)]

    def _mixed(self, batch: Batch, rows: Sequence[int], writes: Sequence[bool], seeds: Sequence[int]) -> MixedBatch:
        given, written = ([row for row in rows if writes[row] == own] for own in (False, True))
        mixed = cast(dict[str, Tensor], pick_rows(batch, given))
        if written:
            own = self.own_text(pick_rows(batch, written), [seeds[row] for row in written])
            mixed |= {f"own_{name}": tensor for name, tensor in own.items()}
        return cast(MixedBatch, mixed)

    def n_tokens(self, batch: Batch) -> Tensor:
        """As `Stage.n_tokens`, of both kinds of rows."""
        return torch.stack([_kind_of(batch, kind)["mask"].sum() for kind in KINDS_OF_ROWS]).sum()

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """As `Stage.totals`, and rows and tokens of each kind."""
        masks = {kind: _kind_of(batch, kind)["mask"] for kind in KINDS_OF_ROWS}
        rows = {f"{kind}_rows": _n_rows(mask) for kind, mask in masks.items()}
        tokens = {f"{kind}_tokens": mask.sum() for kind, mask in masks.items()}
        return Stage.totals(self, batch) | rows | tokens

    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        totals = totals or self.totals(batch)
        losses = []
        for kind in KINDS_OF_ROWS:
            part = _kind_of(batch, kind)
            if len(part["mask"]):
                share = totals[f"{kind}_rows"] / (totals["given_rows"] + totals["own_rows"])
                loss = super().loss(part, {"tokens": totals[f"{kind}_tokens"]}).total
                losses.append(share.to(loss.dtype) * loss)
        return StageLoss(torch.stack(losses).sum(), {})

    @torch.no_grad()
    def own_text(self, batch: Batch, seeds: Sequence[int]) -> Batch:
        """Prompts from the batch and what the student writes after them; the mask is on what predicts its tokens."""
        prompt = slice(0, min(self.prompt_tokens, batch["input_ids"].shape[1]))
        seq_idx, ids = batch["seq_idx"][:, prompt], batch["input_ids"][:, prompt]
        prompt_mask = seq_idx == seq_idx[:, -1:]
        with self._autocast(batch):
            written = self._continued(ids, prompt_mask, seeds)
        n_prompt, eos = ids.shape[1], self.model.generation_config.eos_token_id
        own = written[:, n_prompt:]
        ends = torch.isin(own, torch.as_tensor(-1 if eos is None else eos, device=own.device))
        valid = ends.cumsum(1) - ends.long() == 0  # up to and with the first end
        is_text = torch.cat([prompt_mask, valid], dim=1)
        # What is no text is a document of its own, before or after.
        after = torch.cat([torch.zeros_like(prompt_mask), ~valid], dim=1)
        predicts = torch.zeros_like(is_text)
        predicts[:, n_prompt - 1 : -1] = valid & batch["mask"][:, n_prompt - 1 : n_prompt]
        return {"input_ids": written, "seq_idx": is_text.long() + 2 * after.long(), "mask": predicts}

    def _continued(self, ids_BL: Tensor, mask_BL: Tensor, seeds: Sequence[int]) -> Tensor:
        model: Any = self.model
        training = model.training
        model.eval()
        try:
            return model.generate(
                input_ids=ids_BL,
                attention_mask=mask_BL.long(),
                max_new_tokens=self.new_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([_SampleByRow(seeds, self.sampling_temperature, ids_BL.device)]),
                temperature=None,
                top_k=None,
                top_p=None,
                pad_token_id=0,
            )
        finally:
            model.train(training)


class _SampleByRow(LogitsProcessor):
    """Makes greedy decoding sample: the largest of logits plus Gumbel noise is a draw from their softmax.

    A row's noise depends on its seed and on the token's place alone, not on the rows beside it.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        empty = (torch.empty_like(scores[0], dtype=torch.float64) for _ in scores)
        waits_BV = torch.stack([x_V.exponential_(generator=g) for x_V, g in zip(empty, self._generators, strict=True)])
        return scores / self._temperature - waits_BV.log()


def _kind_of(batch: Batch, kind: str) -> Batch:
    """The given rows of a `MixedBatch`, or the student's own, if need be none."""
    tensors, prefix = cast(dict[str, Tensor], batch), "own_" if kind == "own" else ""
    return cast(Batch, {name: tensors.get(prefix + name, tensors[name][:0]) for name in Batch.__annotations__})


def _n_rows(mask_BL: Tensor) -> Tensor:
    return torch.tensor(len(mask_BL), device=mask_BL.device)


class OutputEmbedding(NamedTuple):
    """What turns a model's last hidden states into logits."""

    module: Any
    config: Any

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputEmbedding:
        return cls(model.get_output_embeddings(), decoder_of(model).config)

    def __call__(self, hidden_BLD: Tensor) -> Tensor:
        return finish_logits(self.module(hidden_BLD), self.config)

    @property
    def is_product(self) -> bool:
        """Whether that is a product with ``module.weight``, all of which is in this process."""
        module = self.module
        whole = type(module) is nn.Linear and module.bias is None and type(module.weight.data) is Tensor
        return (
            whole
            and module.weight.numel() == module.in_features * module.out_features
            and not finishes_logits(self.config)
        )


def make_stage(
    config: StageConfig,
    student: HybridForCausalLM,
    teacher: PreTrainedModel | None,
    *,
    vocab_size: int | None = None,
) -> Stage:
    """The stage that a config describes; one with ``teacher_logits`` leaves the teacher alone.

    Raises ValueError where there is no teacher and the stage needs one.
    """
    if isinstance(config, DistillConfig) and config.teacher_logits is not None:
        return EndToEnd(student, None, vocab_size=vocab_size, **_end_to_end_options(config))
    if teacher is None:
        raise ValueError(f"{config.name} needs the teacher; only end-to-end distillation has teacher_logits on disk.")
    if isinstance(config, AlignConfig):
        return LayerAlignment(
            student,
            teacher,
            target=config.target,
            loss=config.loss,
            train=config.train,
            recompute=config.recompute,
        )
    if isinstance(config, MatrixConfig):
        return MatrixAlignment(student, teacher, recompute=config.recompute)
    if isinstance(config, DistillConfig):
        options = _end_to_end_options(config)
        if isinstance(config, OnPolicyConfig):
            names = ("share", "prompt_tokens", "new_tokens", "sampling_temperature")
            own = {name: getattr(config, name) for name in names}
            return OnPolicy(student, teacher, vocab_size=vocab_size, **own, **options)
        return EndToEnd(student, teacher, vocab_size=vocab_size, **options)
    raise ValueError(
        f"{type(config).__name__} describes no stage; use AlignConfig, MatrixConfig or DistillConfig."
    )


def _end_to_end_options(config: DistillConfig) -> dict[str, Any]:
    names = ("kind", "temperature", "beta", "hard_weight", "train", "recompute", "fused")
    options = {name: getattr(config, name) for name in names}
    return options | ({"segment_len": config.segment_len} if isinstance(config, LongConfig) else {})


def mixer_parameters(student: HybridForCausalLM, train: str) -> dict[str, nn.Parameter]:
    """Parameters of layers with recurrent heads: of those heads (``ssm``) or of the whole ``mixer``."""
    chosen: dict[str, nn.Parameter] = {}
    for layer, mixer in enumerate(student.mixers()):
        if mixer.ssm is not None:
            module = mixer.ssm if train == "ssm" else mixer
            chosen |= {f"{layer}.{name}": parameter for name, parameter in module.named_parameters()}
    return chosen
