"""Tests of other projects that do not apply to students, with a reason each.

A listed test must fail: one that passes, or that its own project skips, fails until its line is
deleted.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import unittest
from collections.abc import Callable
from typing import Any

import pytest
from peer_students import ALL

_SOME_HEADS = "attention probabilities exist for kept heads alone; the test counts all heads"
_NO_HEADS = "no head is kept: there are no attention probabilities"
_NO_ROPE = "no head is kept: nothing reads rotary positions"
_NOT_ALONE = "a decoder is not saved alone: its config would not name the recurrent heads"
_EAGER = "transformers runs Gemma-2 eagerly unless asked"
_DORA = "PEFT refuses rows of different adapters under DoRA"
_DRAWN = "PVeRA draws its weights anew in training mode, in which a new adapter is"
_PREFIX = "prefix tuning puts keys and values before a row; recurrent heads have none"
_SHADOW = "ShadowPEFT makes a second decoder of the backbone's config, which names no kept heads"
# Per pattern of "KIND::TEST" (transformers) or "KIND::TEST[ADAPTER]" (PEFT).
SKIPS: dict[str, str] = {
    "*_some::test_attention_outputs": _SOME_HEADS,
    "*_none::test_attention_outputs": _NO_HEADS,
    "*_none::test_retain_grad_hidden_states_attentions": _NO_HEADS,
    "*_none::test_model_rope_scaling_from_config_*": _NO_ROPE,
    "*::test_correct_missing_keys": _NOT_ALONE,
    "*::test_can_init_all_missing_weights": "from_pretrained refuses a checkpoint without weights",
    "gemma2_*::test_sdpa_can_dispatch_non_composite_models": _EAGER,
    # PEFT 0.21 has the keys and values of a prefix as a cache, which it hands to forward.
    "*::test_inference_safetensors[PrefixTuningConfig]": _PREFIX,
    "*::test_passing_input_embeds_works[PrefixTuningConfig]": _PREFIX,
    "*::test_training_decoders[PrefixTuningConfig]": _PREFIX,
    "*::test_training_prompt_learning_tasks[PrefixTuningConfig]": _PREFIX,
    "*::test_disable_adapter[ShadowConfig]": _SHADOW,
    "*::test_generate[ShadowConfig]": _SHADOW,
    "*::test_generate_half_prec[ShadowConfig]": _SHADOW,
    "*::test_generate_pos_args[ShadowConfig]": _SHADOW,
    "*::test_inference_safetensors[ShadowConfig]": _SHADOW,
    "*::test_passing_input_embeds_works[ShadowConfig]": _SHADOW,
    "*::test_training_decoders[ShadowConfig]": _SHADOW,
    "*::test_training_decoders_gradient_checkpointing[ShadowConfig]": _SHADOW,
    "*::test_training_decoders_layer_indexing[ShadowConfig]": _SHADOW,
    "*::test_unload_adapter[ShadowConfig]": _SHADOW,
    "llama_discrete_none::test_disable_adapter[PveraConfig]": _DRAWN,
    "*::test_*mixed_adapter_batches[LoraConfig use_dora]": _DORA,
}

SKIPPED = (unittest.SkipTest, pytest.skip.Exception)


def reason_to_skip(name: str) -> str | None:
    """Return why a test is listed; None if it is not."""
    for pattern, reason in SKIPS.items():
        if fnmatch.fnmatchcase(name, as_fnmatch(pattern)):
            return reason
    return None


def as_fnmatch(pattern: str) -> str:
    """Return a pattern of `SKIPS` for fnmatch, in which brackets are a set of characters."""
    return pattern.replace("[", "[[]")


def checked(test: Any, name_of: Callable[..., str]) -> Callable[..., None]:
    """Wrap a test of another project: skip it if it is listed and fails.

    ``name_of`` returns the name in `SKIPS` from the test's arguments.
    """

    @functools.wraps(test)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        name = name_of(self, *args, **kwargs)
        reason = reason_to_skip(name)
        if reason is None:
            _run(test, self, *args, **kwargs)
            return
        try:
            with _raising_subtests(self):
                test(self, *args, **kwargs)
        except SKIPPED as skip:
            pytest.fail(f"{name} is listed, but its project skips it ({skip}); delete the line.")
        except Exception:
            pytest.skip(reason)
        pytest.fail(f"{name} is listed, but passes; delete the line.")

    # unittest would not call a test that a decorator skips. Called, some would start a process
    # before they skip themselves.
    if vars(wrapped).pop("__unittest_skip__", False):
        test = _skipped(test.__unittest_skip_why__)
    return wrapped


def _skipped(why: str) -> Callable[..., None]:
    def skip(*args: Any, **kwargs: Any) -> None:
        raise unittest.SkipTest(why)

    return skip


def _run(test: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run a test. Give one reason for all that its project skips: pytest folds them to a line."""
    try:
        test(*args, **kwargs)
    except SKIPPED:
        if ALL:
            raise
        pytest.skip("skipped by its own project; `make peers` says why")


@contextlib.contextmanager
def _raising_subtests(case: Any) -> Any:
    """Let failures of subtests end the test: pytest would report each on its own."""
    if not isinstance(case, unittest.TestCase):
        yield
        return
    case.subTest = lambda *args, **kwargs: contextlib.nullcontext()
    try:
        yield
    finally:
        del case.subTest
