"""Small random students, and what is asked of them in more than one test file."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hybrid_distill.cli.slow_imports import NOTICE
from hybrid_distill.export import GateReport
from hybrid_distill.export.check import TOLERANCE as GATE_TOLERANCE
from hybrid_distill.export.check import run_checks
from hybrid_distill.model import HybridCache, HybridForCausalLM, HybridMixer, packed_inputs
from hybrid_distill.model.field_rules import RECURRENCES, release
from hybrid_distill.model.layout import CACHE_NAMES
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student


def since(version: str) -> pytest.MarkDecorator:
    """Skip a test under older versions of transformers, which do this otherwise, or not."""
    older = release(transformers.__version__) < release(version)
    return pytest.mark.skipif(
        older, reason=f"transformers before {version} does this otherwise, or not"
    )


COMPUTATIONS = tuple(name for name in RECURRENCES if name != "mamba2-stock")
"""Recurrences that compute differently; ``mamba2-stock`` only lacks a bias."""
TOLERANCE = {"fp32": {"rtol": 1e-5, "atol": 2e-6}}
# Norm of the error over the norm of the logits: 0.018 to 0.027 over families and seeds, 0.01 of
# attention alone.
BF16_RELATIVE_ERROR = 0.04
# Of 8 heads in 4 KV groups: three of groups 0, 0, 1; all but one.
THREE = (0, 1, 2)
ALL_BUT_ONE = (0, 1, 2, 3, 4, 6, 7)
# What makes each family hard: biases, head norms, short windows, layers of two kinds, tied
# embeddings, norms over all heads, one projection for queries, keys and values, RoPE on a part of
# each head.
HARD: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"attention_bias": True},
    "mistral": {"sliding_window": 6},
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 6},
    "phi": {"partial_rotary_factor": 0.25, "qk_layernorm": True},
    "phi3": {"sliding_window": 6, "partial_rotary_factor": 0.5},
    "gpt_neox": {"tie_word_embeddings": True, "rotary_pct": 0.5},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [20.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 20,
}
SPECIAL = ["<pad>", "<s>", "</s>", "<tool>", "<image>"]


def keep(teacher: PreTrainedModel, *heads_of_layers: tuple[int, ...]) -> HeadPlan:
    pairs = []
    for layer, heads in enumerate(heads_of_layers):
        pairs += [(layer, head) for head in heads]
    return HeadPlan.from_pairs(teacher, pairs)


def student_of(
    teacher: PreTrainedModel,
    plan: HeadPlan,
    d_state: int = 5,
    recurrence: str = "discrete",
    window: int = 0,
) -> HybridForCausalLM:
    """Build a student whose recurrent heads use all they have: taps, gate, decay by token, D."""
    student, _ = build_student(teacher, plan, d_state=d_state, recurrence=recurrence, window=window)
    with torch.no_grad():
        for parameter in recurrent_parameters(student):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return student


def recurrent_parameters(student: HybridForCausalLM) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of the recurrent heads."""
    for heads in student.recurrent_heads():
        yield from heads.parameters()


def tiny_student(
    family: str, *, d_state: int = 8, recurrence: str = "discrete"
) -> tuple[HybridForCausalLM, HeadPlan]:
    """Build a student with heads kept in two layers of three; Qwen2's embeddings are tied."""
    teacher = make_family_model(family, vocab_size=300, tie_word_embeddings=family == "qwen2")
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 2), (1, 3), (1, 7)])
    return build_student(teacher, plan, d_state=d_state, recurrence=recurrence)[0], plan


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and special tokens with and without a role."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<tool>", "<image>"], **roles
    )


def mixed_student(teacher: PreTrainedModel, recurrence: str = "discrete") -> HybridForCausalLM:
    """Layers that keep three heads (which share KV heads unevenly), none, and all but one."""
    return student_of(teacher, keep(teacher, THREE, (), ALL_BUT_ONE), recurrence=recurrence)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 101, shape)


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids [B, L] whose pads are not zeros, and their mask."""
    length = max(len(prompt) for prompt in prompts)
    rows = []
    mask = torch.ones(len(prompts), length, dtype=torch.long)
    for number, prompt in enumerate(prompts):
        n_pads = length - len(prompt)
        rows.append(torch.cat([tokens(n_pads), prompt]))
        mask[number, :n_pads] = 0
    return torch.stack(rows), mask


def positions_of(mask: Tensor) -> Tensor:
    """Count the tokens of each row and not its padding, which gets any position."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def close(actual: Tensor, expected: Tensor, precision: str = "fp32") -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[precision])


def same_logits(actual: Tensor, expected: Tensor) -> None:
    """Allow for another order of sums, as the gate of an export does."""
    error = (actual - expected).abs().max()
    assert error < GATE_TOLERANCE[torch.float32] * expected.abs().max()


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


def logits_in_pieces(
    model: Any,
    ids: Tensor,
    lengths: Sequence[int],
    *,
    cache: HybridCache | None = None,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Read rows piece by piece into a cache; return the logits of all pieces.

    As in `generate`, the mask of a piece covers what was read before it; its positions do not."""
    cache = model.new_cache() if cache is None else cache
    outputs = []
    end = 0
    for length in lengths:
        start = end
        end += length
        inputs: dict[str, Any] = {"cache": cache}
        if mask is not None:
            inputs["attention_mask"] = mask[:, :end]
        if positions is not None:
            inputs["position_ids"] = positions[:, start:end]
        outputs.append(logits(model, ids[:, start:end], **inputs))
    return torch.cat(outputs, dim=1)


def packed_logits(model: PreTrainedModel, ids: Tensor, seq_idx: Tensor) -> Tensor:
    """Logits of a student, or of its teacher, on packed documents."""
    if isinstance(model, HybridForCausalLM):
        return logits(model, ids, seq_idx=seq_idx)
    return logits(model, ids, use_cache=False, **packed_inputs(seq_idx, config=model.config))


def gate_in_this_process(
    monkeypatch: pytest.MonkeyPatch, modules: Path, new_tokens: int | None = None
) -> None:
    """Check exports here, where torch is loaded already; ``modules`` is for their Python files.

    ``new_tokens`` shortens the texts that a record holds, where exports are not what is tested.
    """

    def run_gate(folder: Path, device: str, *, shown_path: Path | None = None) -> GateReport:
        # The name of an export under way has dots, which a Python package's cannot have.
        alias = modules.with_name("alias")
        alias.unlink(missing_ok=True)
        alias.symlink_to(folder.resolve(), target_is_directory=True)
        return GateReport(tuple(run_checks(alias, alias / "gate", device=device)))

    if new_tokens is not None:
        monkeypatch.setattr("hybrid_distill.export.record.NEW_TOKENS", new_tokens)
    monkeypatch.setattr("hybrid_distill.export.gate.run_gate", run_gate)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    # Before transformers 5.10 another test's come first.
    monkeypatch.delitem(sys.modules, "transformers_modules", raising=False)
    modules.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(modules)


def only_error(stderr: str) -> str:
    """Return the one line that a refused command printed, but for the notice of a slow import."""
    (line,) = [line for line in stderr.splitlines() if line != NOTICE]
    assert line.startswith("error: ")
    return line


def lose_caches(monkeypatch: Any) -> None:
    """Keep every cache from the mixers, as transformers 5.24 did by renaming the argument."""
    heads = HybridMixer.heads

    def without_cache(self: HybridMixer, *args: Any, **kwargs: Any) -> Tensor:
        others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        return heads(self, *args, **others)

    monkeypatch.setattr(HybridMixer, "heads", without_cache)
