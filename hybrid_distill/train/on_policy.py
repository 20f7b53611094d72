"""End-to-end distillation on text that the student generates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..data import Batch, pick_rows
from ..model.modeling_hybrid import HybridForCausalLM
from ..teacher import eval_mode, generated
from .config import DistillOnPolicy
from .end_to_end import EndToEnd
from .stage import Stage, StageLoss, Totals, n_rows

KINDS_OF_ROWS = ("given", "own")


class MixedBatch(Batch, total=False):
    """Rows from the data and, in ``own``, rows that the student generated, of another length; either may be empty."""

    own: Batch


class OnPolicy(EndToEnd):
    """`EndToEnd` with some rows of text that the student generates (arXiv 2306.13649).

    The student continues a row's first ``prompt_tokens``, from the last document that begins there; the teacher then
    judges every token that it generated. ``share`` is the probability that a row is generated. The loss is the mean
    over the tokens of given rows and the mean over generated tokens, weighted by the number of rows: a generated row
    counts as much as a given one, however short. Likelihood on given text hides the errors of generation; this stage
    trains on them.

    Each row has its own seed: however the step is split, the same rows are generated, with the same text except for
    rounding. In bfloat16 the logits depend on how many rows are computed together, enough to change a token.
    """

    shardable = False

    def __init__(self, student: HybridForCausalLM, teacher: PreTrainedModel, config: DistillOnPolicy) -> None:
        super().__init__(student, teacher, config)
        self.writing = config

    def micro_batches(self, batch: Batch, size: int, seeds: Sequence[int]) -> list[Batch]:
        """Split as `Stage.micro_batches` does, with the student's text. Rows of a kind are grouped, so that many are
        generated in one batch."""
        writes = [random.Random(seed).random() < self.writing.share for seed in seeds]
        order = sorted(range(len(seeds)), key=lambda row: writes[row])
        return [self._mixed(batch, order[first : first + size], writes, seeds) for first in range(0, len(order), size)]

    def _mixed(self, batch: Batch, rows: Sequence[int], writes: Sequence[bool], seeds: Sequence[int]) -> MixedBatch:
        given, written = ([row for row in rows if writes[row] == own] for own in (False, True))
        mixed: MixedBatch = {**pick_rows(batch, given)}
        if written:
            mixed["own"] = self.own_text(pick_rows(batch, written), [seeds[row] for row in written])
        return mixed

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count as `Stage.n_tokens` does, over both kinds of rows."""
        return torch.stack([_kind_of(batch, kind)["mask"].sum() for kind in KINDS_OF_ROWS]).sum()

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Extend `Stage.totals` by the rows and tokens of each kind."""
        masks = {kind: _kind_of(batch, kind)["mask"] for kind in KINDS_OF_ROWS}
        rows = {f"{kind}_rows": n_rows(mask) for kind, mask in masks.items()}
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
        """Let the student continue prompts from the batch; the mask keeps the positions that predict its tokens."""
        prompt = slice(0, min(self.writing.prompt_tokens, batch["input_ids"].shape[1]))
        seq_idx, ids = batch["seq_idx"][:, prompt], batch["input_ids"][:, prompt]
        prompt_mask = seq_idx == seq_idx[:, -1:]
        with self.autocast(batch):
            written = self._continued(ids, prompt_mask, seeds)
        n_prompt, eos = ids.shape[1], self.model.generation_config.eos_token_id
        own = written[:, n_prompt:]
        ends = torch.isin(own, torch.as_tensor(-1 if eos is None else eos, device=own.device))
        valid = ends.cumsum(1) - ends.long() == 0  # up to and including the first end token
        is_text = torch.cat([prompt_mask, valid], dim=1)
        # Padding before and after the text counts as other documents.
        after = torch.cat([torch.zeros_like(prompt_mask), ~valid], dim=1)
        predicts = torch.zeros_like(is_text)
        predicts[:, n_prompt - 1 : -1] = valid & batch["mask"][:, n_prompt - 1 : n_prompt]
        return {"input_ids": written, "seq_idx": is_text.long() + 2 * after.long(), "mask": predicts}

    def _continued(self, ids_BL: Tensor, mask_BL: Tensor, seeds: Sequence[int]) -> Tensor:
        sample = _SampleByRow(seeds, self.writing.sampling_temperature, ids_BL.device)
        with eval_mode(self.model):
            return generated(
                self.model,
                input_ids=ids_BL,
                attention_mask=mask_BL.long(),
                max_new_tokens=self.writing.new_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([sample]),
                temperature=None,
                top_k=None,
                top_p=None,
                pad_token_id=0,
            )


class _SampleByRow(LogitsProcessor):
    """Sampling by greedy decoding: the argmax of logits plus Gumbel noise is a draw from their softmax.

    A row's noise depends only on its seed and the token's position, not on other rows in the batch.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        empty = (torch.empty_like(scores[0], dtype=torch.float64) for _ in scores)
        waits_BV = torch.stack([x_V.exponential_(generator=g) for x_V, g in zip(empty, self._generators, strict=True)])
        return scores / self._temperature - waits_BV.log()


def _kind_of(batch: Batch, kind: str) -> Batch:
    """Return the given rows of a `MixedBatch`, or the generated ones, possibly none."""
    given: Batch = {"input_ids": batch["input_ids"], "seq_idx": batch["seq_idx"], "mask": batch["mask"]}
    return given if kind == "given" else cast(MixedBatch, batch).get("own", pick_rows(given, slice(0)))
