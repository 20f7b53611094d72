"""End-to-end distillation on text that the student generates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from ..data import Batch, pick_rows
from ..model.modeling_hybrid import HybridForCausalLM
from ..teacher import eval_mode, generate_ids
from .config import DistillOnPolicy
from .end_to_end import EndToEnd
from .stage import Stage, StageLoss, Totals, n_rows, teacher_hidden


class MixedBatch(Batch, total=False):
    """Rows from the data and, in ``generated``, rows that the student wrote, of another length; either may be empty."""

    generated: Batch


class OnPolicy(EndToEnd):
    """`EndToEnd` with some rows of text that the student generates (arXiv 2306.13649).

    The student continues a row's first ``prompt_tokens``, from the last document that begins there; the teacher then
    judges every token that it generated. ``share`` is the probability that a row is generated. The loss is the mean
    over the tokens of data rows and the mean over generated tokens, weighted by the number of rows: a generated row
    counts as much as a data row, however short. Likelihood on the data hides the errors of generation; this stage
    trains on them.

    Each row has its own seed: however the step is split, the same rows are generated, with the same text except for
    rounding. In bfloat16 the logits depend on how many rows are computed together, enough to change a token.
    """

    # Generation runs the decoder over and over, outside of the call that gathers the weights.
    shardable = False

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel,
        config: DistillOnPolicy,
    ) -> None:
        super().__init__(student, teacher, config)
        # Also self.config, which is of the parent's class to type checkers.
        self.generation = config

    def whole_layers(self) -> list[nn.Module]:
        """Return none: each number and length of generated rows would be compiled anew."""
        return []

    def compiled_length(self, seq_len: int) -> int | None:
        """Return the length of data rows: generated ones have many."""
        return seq_len

    def micro_batches(
        self,
        batch: Batch,
        size: int,
        seeds: Sequence[int],
    ) -> list[Batch]:
        """Split as `Stage.micro_batches` does, with the student's text.

        Rows of a kind are grouped, so that many are generated in one batch.
        """
        is_generated = [random.Random(seed).random() < self.generation.share for seed in seeds]
        rows = range(len(seeds))
        data_rows = [row for row in rows if not is_generated[row]]
        generated_rows = [row for row in rows if is_generated[row]]
        order = data_rows + generated_rows
        n_data = len(data_rows)

        micro_batches: list[Batch] = []
        for first in range(0, len(order), size):
            end = first + size
            from_data = order[first : min(end, n_data)]
            to_generate = order[max(first, n_data) : end]
            micro_batches.append(self._mixed(batch, from_data, to_generate, seeds))
        return micro_batches

    def _mixed(
        self,
        batch: Batch,
        from_data: list[int],
        to_generate: list[int],
        seeds: Sequence[int],
    ) -> MixedBatch:
        """Pick the rows ``from_data`` as they are, and let the student continue those ``to_generate``."""
        mixed: MixedBatch = {**pick_rows(batch, from_data)}
        if to_generate:
            seeds_of_rows = [seeds[row] for row in to_generate]
            mixed["generated"] = self.generate_text(pick_rows(batch, to_generate), seeds_of_rows)
        return mixed

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count as `Stage.n_tokens` does, over data rows and generated rows."""
        counts = [rows["mask"].sum() for rows in _rows_by_source(batch).values()]
        return torch.stack(counts).sum()

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Extend `Stage.totals` by the rows and tokens of each source."""
        # Not those of `EndToEnd`, which counts labels: a student's own text is not a label.
        totals = Stage.totals(self, batch)
        for source, rows in _rows_by_source(batch).items():
            totals[f"{source}_rows"] = n_rows(rows["mask"])
            totals[f"{source}_tokens"] = rows["mask"].sum()
        return totals

    def loss(self, batch: Batch, totals: Totals) -> StageLoss:
        totals = totals or self.totals(batch)
        n_all_rows = totals["data_rows"] + totals["generated_rows"]
        losses = []
        for source, rows in _rows_by_source(batch).items():
            if len(rows["mask"]) == 0:
                self._gather_teacher(batch)
                continue
            n_tokens = totals[f"{source}_tokens"]
            loss = super().loss(rows, {"tokens": n_tokens}).total
            share = totals[f"{source}_rows"] / n_all_rows
            losses.append(share.to(loss.dtype) * loss)
        return StageLoss(torch.stack(losses).sum(), {})

    def _gather_teacher(self, batch: Batch) -> None:
        """Take part in the other processes' run of a sharded teacher, for a source that has no rows here.

        All processes gather a layer together: if one ran the teacher less often, the others would wait for it.
        """
        if not self.teacher_is_sharded:
            return
        # The smallest batch that there is: what it contains does not matter.
        one_token: Batch = {
            "input_ids": batch["input_ids"].new_zeros(1, 1),
            "seq_idx": batch["seq_idx"].new_zeros(1, 1),
            "mask": batch["mask"].new_zeros(1, 1),
        }
        teacher_hidden(self.teacher, one_token)

    @torch.no_grad()
    def generate_text(self, batch: Batch, seeds: Sequence[int]) -> Batch:
        """Let the student continue prompts from the batch; the mask keeps the positions that predict its tokens."""
        n_prompt = min(self.generation.prompt_tokens, batch["input_ids"].shape[1])
        prompt_BL = batch["input_ids"][:, :n_prompt]
        seq_idx_BL = batch["seq_idx"][:, :n_prompt]
        # From the last document that begins in the prompt; the ones before are hidden as padding.
        in_prompt_BL = seq_idx_BL == seq_idx_BL[:, -1:]
        with self.autocast(batch):
            text_BL = self._continue_prompts(prompt_BL, in_prompt_BL, seeds)

        # Up to and including the first end token; rows that end early are filled up to the longest.
        is_end = self._is_end(text_BL[:, n_prompt:])
        n_ends_before = is_end.cumsum(1) - is_end.long()
        is_written = n_ends_before == 0
        is_text_BL = torch.cat([in_prompt_BL, is_written], dim=1)
        is_after_BL = torch.cat([torch.zeros_like(in_prompt_BL), ~is_written], dim=1)

        # The position before a token predicts it, so the mask begins at the prompt's last one.
        # If that one is masked, none of the row's text counts.
        counts = batch["mask"][:, n_prompt - 1 : n_prompt]
        mask_BL = torch.zeros_like(is_text_BL)
        mask_BL[:, n_prompt - 1 : -1] = is_written & counts
        return {
            "input_ids": text_BL,
            # Padding before and after the text counts as other documents: 0, 1 for the text, 2.
            "seq_idx": is_text_BL.long() + 2 * is_after_BL.long(),
            "mask": mask_BL,
        }

    def _is_end(self, ids_BL: Tensor) -> Tensor:
        """Find end tokens, of which a model may have none, one or several."""
        end_ids = self.model.generation_config.eos_token_id
        if end_ids is None:
            return torch.zeros_like(ids_BL, dtype=torch.bool)
        return torch.isin(ids_BL, torch.as_tensor(end_ids, device=ids_BL.device))

    def _continue_prompts(self, ids_BL: Tensor, mask_BL: Tensor, seeds: Sequence[int]) -> Tensor:
        """Return the prompts with the student's text after them, [B, L + at most ``new_tokens``]."""
        sample = _SampleByRow(seeds, self.generation.sampling_temperature, ids_BL.device)
        with eval_mode(self.model):
            return generate_ids(
                self.model,
                input_ids=ids_BL,
                attention_mask=mask_BL.long(),
                max_new_tokens=self.generation.new_tokens,
                # transformers samples all rows with one generator; a row's text would then depend
                # on the others. Greedy decoding of noisy logits samples with one per row.
                do_sample=False,
                processors=[sample],
                # The loss of this text is NaN too: all processes then skip or stop together.
                refuses_nan=False,
                # Any token will do: it stands behind a row's end, where the mask is off.
                pad_token_id=0,
            )


class _SampleByRow(LogitsProcessor):
    """Sampling by greedy decoding: the argmax of logits plus Gumbel noise is a draw from their softmax.

    A row's noise depends only on its seed and the token's position, not on other rows in the batch.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        temperature: float,
        device: torch.device,
    ) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        waits = []
        for scores_V, generator in zip(scores, self._generators, strict=True):
            # In float64: the shortest waits decide, and those are coarse in float32.
            empty_V = torch.empty_like(scores_V, dtype=torch.float64)
            waits.append(empty_V.exponential_(generator=generator))
        # Gumbel noise is minus the logarithm of exponential waiting times.
        noise_BV = -torch.stack(waits).log()
        return scores / self._temperature + noise_BV


def _rows_by_source(batch: Batch) -> dict[str, Batch]:
    """Return the ``data`` rows and the ``generated`` rows of a `MixedBatch`; either may be empty."""
    data: Batch = {
        "input_ids": batch["input_ids"],
        "seq_idx": batch["seq_idx"],
        "mask": batch["mask"],
    }
    no_rows = pick_rows(data, slice(0))
    return {"data": data, "generated": cast(MixedBatch, batch).get("generated", no_rows)}
