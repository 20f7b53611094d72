"""transformers' own tests of a model class, on `HybridForCausalLM`."""

from __future__ import annotations

import json
import unittest
from typing import Any
from unittest import mock

import torch
from peer_skips import checked
from peer_sources import import_tests
from peer_students import ALL, EVERY, FEW, SHAPE, Kind

from hybrid_distill.model import (
    HybridConfig,
    HybridForCausalLM,
    HybridForSequenceClassification,
    HybridModel,
)

modeling = import_tests("transformers", "test_modeling_common")
configuration = import_tests("transformers", "test_configuration_common")
training = import_tests("transformers", "test_training_mixin")
generation = import_tests("transformers", "generation.test_utils")

MODEL_CLASSES = (HybridForCausalLM, HybridModel, HybridForSequenceClassification)


class HybridTester:
    """Configs and inputs for transformers' tests, with the attributes that these read."""

    batch_size = 3
    seq_length = 7
    is_training = True
    vocab_size = SHAPE["vocab_size"]
    hidden_size = SHAPE["hidden_size"]
    num_hidden_layers = SHAPE["num_hidden_layers"]
    num_attention_heads = SHAPE["num_attention_heads"]

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def get_config(self) -> HybridConfig:
        return self.kind.config()

    def prepare_config_and_inputs_for_common(self) -> tuple[HybridConfig, dict[str, Any]]:
        shape = (self.batch_size, self.seq_length)
        inputs = {
            "input_ids": torch.randint(3, self.vocab_size, shape),
            "attention_mask": torch.ones(shape, dtype=torch.long),
        }
        return self.get_config(), inputs


class HybridTests(
    modeling.ModelTesterMixin, generation.GenerationTesterMixin, training.TrainingTesterMixin
):
    """The tests of one kind of student."""

    kind: Kind
    model_tester: Any = None
    all_model_classes = MODEL_CLASSES
    # transformers takes a file without a year for an old one.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = HybridTester(self.kind)
        self.config_tester = configuration.ConfigTester(
            self, config_class=HybridConfig, has_text_modality=True, **_config_fields(self.kind)
        )
        # These tests look up by name which class takes no labels, in a list of transformers' own classes.
        names = {HybridConfig.model_type: HybridModel.__name__}
        added = mock.patch.dict(modeling.MODEL_MAPPING_NAMES, names)
        added.start()
        self.addCleanup(added.stop)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


def _config_fields(kind: Kind) -> dict[str, Any]:
    config = kind.config()
    # The tests compare with JSON, whose keys are text.
    backbone = json.loads(json.dumps(config.backbone))
    return {
        "backbone": backbone,
        "kept": config.kept,
        "d_state": config.d_state,
        "recurrence": kind.recurrence,
    }


def _name_of(case: Any) -> str:
    return f"{case.kind.name}::{case._testMethodName}"


# Seconds each, and alike for all kinds: run for one of `FEW`.
ONCE = ("test_training_overfit", "test_bc_torch_dtype")


def _make_tests(kind: Kind) -> type[unittest.TestCase]:
    """Make a class of all tests of a kind, each checked against `peer_skips.SKIPS`."""
    members: dict[str, Any] = {"kind": kind, "__module__": __name__}
    for name in dir(HybridTests):
        if not name.startswith("test_") or not callable(getattr(HybridTests, name)):
            continue
        members[name] = checked(getattr(HybridTests, name), _name_of)
        if name in ONCE and not ALL and kind is not FEW[0]:
            members[name] = None
    return type(f"Test_{kind.name}", (HybridTests, unittest.TestCase), members)


_kinds = FEW
if ALL:
    _kinds = EVERY
for _kind in _kinds:
    globals()[f"Test_{_kind.name}"] = _make_tests(_kind)
