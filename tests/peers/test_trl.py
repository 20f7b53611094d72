"""TRL's losses on students: it runs the decoder alone, and caps logits as the config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peer_students import ALL, EVERY, FEW, Kind, make_student
from students import byte_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.model import HybridForCausalLM

trl = pytest.importorskip("trl", reason="TRL needs Python 3.11")
from datasets import Dataset  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

KINDS = FEW
TRAINED = (Kind("gemma2", "discrete", "some"),)  # Gemma-2 caps its logits, Gemma-3 does not
if ALL:
    KINDS = EVERY
    TRAINED = tuple(kind for kind in EVERY if kind.kept == "some")
N_COMPLETION = 5
ARGUMENTS: dict[str, Any] = {
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": 64,
}


def _named(kinds: tuple[Kind, ...]) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=[kind.name for kind in kinds])


def make_capped(kind: Kind, **overrides: Any) -> HybridForCausalLM:
    """Make a student; Gemma-2's cap is as small as a random model's logits, so that it matters."""
    if kind.family == "gemma2":
        overrides["final_logit_softcapping"] = 0.1
    return make_student(kind, **overrides)


@torch.no_grad()
def token_log_probs(student: PreTrainedModel, ids_L: Tensor) -> Tensor:
    """Return the log-probability of each token of a row but the first, by `forward` on it alone."""
    logits_LV = student(ids_L[None]).logits[0, :-1].float()
    return logits_LV.log_softmax(-1).gather(-1, ids_L[1:, None])[:, 0]


def _left_padded(prompts: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return rows of a prompt and a completion each, the same rows left-padded, and their mask."""
    rows = [torch.randint(3, 99, (length + N_COMPLETION,)) for length in prompts]
    longest = max(map(len, rows))
    ids_BL = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for index, row in enumerate(rows):
        ids_BL[index, longest - len(row) :] = row
        mask_BL[index, longest - len(row) :] = 1
    return rows, ids_BL, mask_BL


@_named(KINDS)
def test_completions_of_padded_rows_are_as_likely_through_the_decoder(kind: Kind) -> None:
    """As the distillation trainer does: the decoder, the output embedding, the config's cap."""
    student = make_capped(kind)
    rows, ids_BL, mask_BL = _left_padded((9, 2, 5))
    with torch.no_grad():
        hidden_BLD = student.get_decoder()(
            input_ids=ids_BL, attention_mask=mask_BL, use_cache=False
        ).last_hidden_state
        logits_BLV = student.get_output_embeddings()(hidden_BLD[:, -N_COMPLETION - 1 : -1])
    cap = getattr(student.config, "final_logit_softcapping", None)
    if cap is not None:
        logits_BLV = cap * torch.tanh(logits_BLV / cap)
    completion_BL = ids_BL[:, -N_COMPLETION:]
    log_probs_BL = logits_BLV.log_softmax(-1).gather(-1, completion_BL[..., None])[..., 0]
    for row, log_probs_L in zip(rows, log_probs_BL, strict=True):
        torch.testing.assert_close(log_probs_L, token_log_probs(student, row)[-N_COMPLETION:])


@_named(KINDS)
def test_the_fused_head_computes_what_forward_does(kind: Kind) -> None:
    """SFT, DPO and GRPO compute their log-probabilities with it."""
    student = make_capped(kind)
    rows, ids_BL, mask_BL = _left_padded((9, 2, 5))
    expected = [token_log_probs(student, row)[-N_COMPLETION:] for row in rows]
    labels_BL = ids_BL.clone()
    labels_BL[:, :-N_COMPLETION] = -100
    add_fused_lm_head(student)
    with torch.no_grad():
        outputs = student(
            input_ids=ids_BL, attention_mask=mask_BL, labels=labels_BL, fused_lm_head=True
        )
    for log_probs_L, row in zip(outputs.log_probs, expected, strict=True):
        torch.testing.assert_close(log_probs_L[-N_COMPLETION:], row)


@_named(TRAINED)
def test_sft_reports_the_loss_of_forward(kind: Kind, tmp_path: Path) -> None:
    student = make_capped(kind, vocab_size=300)
    tokenizer = byte_tokenizer()
    texts = ["The flag is red.", "The flag of town 2 is blue.", "No.", "Yes, the flag is green."]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    log_probs = torch.cat([token_log_probs(student, torch.tensor(row)) for row in rows])
    trainer = trl.SFTTrainer(
        student,
        trl.SFTConfig(str(tmp_path), **ARGUMENTS),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(-log_probs.mean().item(), rel=1e-4)


@_named(TRAINED)
def test_dpo_reports_the_log_probabilities_of_forward(kind: Kind, tmp_path: Path) -> None:
    student = make_capped(kind, vocab_size=300)
    tokenizer = byte_tokenizer()
    pairs = [
        ("The flag is ", "red.", "a flag."),
        ("Is it? ", "Yes, it is.", "No."),
        ("So ", "be it.", "what?"),
    ]
    columns = ("prompt", "chosen", "rejected")
    trainer = trl.DPOTrainer(
        student,
        make_capped(kind, vocab_size=300),
        args=trl.DPOConfig(str(tmp_path), **ARGUMENTS),
        train_dataset=Dataset.from_list([dict(zip(columns, pair)) for pair in pairs]),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    totals = []
    for ids_L, mask_L, completion_L in zip(
        batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    ):
        is_token_L = mask_L.bool()
        log_probs_L = token_log_probs(student, ids_L[is_token_L])
        totals.append(log_probs_L[completion_L[is_token_L].bool()[1:]].sum())
    chosen = torch.stack(totals[: len(pairs)])  # the rejected ones come after
    trainer.train()
    assert trainer.state.log_history[0]["logps/chosen"] == pytest.approx(
        chosen.mean().item(), rel=1e-4
    )
