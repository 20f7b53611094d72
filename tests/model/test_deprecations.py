"""Nothing that transformers deprecates is relied on: what goes in a next release fails today."""

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import FAMILIES as SUPPORTED
from conftest import make_family_model
from students import mixed_student, packed_logits, tokens
from transformers import PreTrainedModel

from hybrid_distill.model.layout import attention_name, cache_argument, decoder_of
from hybrid_distill.student.family_check import check_family
from hybrid_distill.train.end_to_end import checkpoint_activations

FAMILIES = (*SUPPORTED, "gemma2", "gemma3", "nemotron", "llama4", "stablelm")
# Arguments that this package passes to some forward by name, beside a cache.
PASSED = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "use_cache",
    "labels",
    "logits_to_keep",
    "hidden_states",
    "position_embeddings",
}


def deprecated_arguments(function: Callable[..., Any]) -> set[str]:
    """Return the names that decorators of `transformers.utils.deprecation` replace.

    Each decorator holds one of them as its free variable `old_name`.
    """
    names = set()
    while True:
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        if "old_name" in free:
            names.add(free["old_name"].cell_contents)
        if not hasattr(function, "__wrapped__"):
            return names
        function = function.__wrapped__


def forwards(model: PreTrainedModel) -> Iterator[Callable[..., Any]]:
    decoder = decoder_of(model)
    layer = decoder.layers[0]
    for module in (model, decoder, layer, getattr(layer, attention_name(layer))):
        yield type(module).forward


def test_a_deprecated_argument_is_recognized() -> None:
    deprecation = pytest.importorskip("transformers.utils.deprecation")

    @deprecation.deprecate_kwarg("old", "99.0.0", new_name="new")
    @deprecation.deprecate_kwarg("older", "99.0.0", new_name="new")
    def forward(self, new=None):
        return new

    assert deprecated_arguments(forward) == {"old", "older"}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_argument_that_is_passed_is_deprecated(family: str) -> None:
    for forward in forwards(make_family_model(family)):
        assert not deprecated_arguments(forward) & {*PASSED, cache_argument(forward)}


@pytest.fixture
def deprecations(caplog) -> Iterator[Callable[[], list[str]]]:
    """Collect the deprecated names that transformers warns of or logs."""
    logger = logging.getLogger("transformers")
    propagates = logger.propagate
    logger.propagate = True

    def collected() -> list[str]:
        warned = [str(warning.message) for warning in caught]
        texts = [*warned, *caplog.messages]
        return [text for text in texts if "deprecated" in text and "torch" not in text]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield collected
    logger.propagate = propagates


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_logs_that_something_is_deprecated(family: str, deprecations) -> None:
    teacher = make_family_model(family)
    check_family(teacher)
    student = mixed_student(teacher)
    ids = tokens(2, 12)
    seq_idx = torch.tensor([[0] * 5 + [1] * 7]).expand(2, -1)
    packed_logits(student, ids, seq_idx)
    student.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    student.train()
    checkpoint_activations(student)
    student(ids, labels=ids).loss.backward()
    assert deprecations() == []
