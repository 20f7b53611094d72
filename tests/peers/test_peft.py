"""PEFT's own tests of adapters on decoders, on `HybridForCausalLM`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
from peer_skips import checked
from peer_sources import import_tests
from peer_students import ALL, Kind, make_student
from students import byte_tokenizer

decoders = import_tests("peft", "test_decoder_models")

# One of each recurrence. Where all heads are kept, the modules are those of models in PEFT's own
# tests.
KINDS = [Kind("qwen3", "mamba2", "some")]
if ALL:
    KINDS += [Kind("llama", "discrete", "none"), Kind("gemma2", "gdn", "some")]
# No projection but a_proj has fewer than 32 rows: the tests combine adapters of ranks up to 28.
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "vocab_size": 300}
D_STATE = 32
# The projections of docs/finetuning.md. PEFT asks for them where it does not know the model type.
WIDE = ["x_proj", "b_proj", "c_proj", "z_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS: dict[type, list[str]] = {
    # a_proj has one or two rows a head: too few here for methods that divide rows, or for a rank
    # of 8.
    decoders.HRAConfig: [*WIDE, "a_proj"],
    decoders.IA3Config: [*WIDE, "a_proj"],
    # Their conversion to LoRA is approximate: its error may be large only in few projections.
    decoders.FourierFTConfig: ["x_proj", "q_proj"],
    decoders.GraloraConfig: ["x_proj", "q_proj"],
    # Trains biases alone.
    decoders.BeftConfig: ["z_proj", "a_proj"],
}


# Without PEERS=all, their first settings: a low rank, a scale, rotations, and tokens or keys and
# values before the row.
FEW_ADAPTERS = [
    decoders.LoraConfig,
    decoders.IA3Config,
    decoders.BOFTConfig,
    decoders.HRAConfig,
    decoders.PromptTuningConfig,
    decoders.PrefixTuningConfig,
]
_LORA = {"task_type": "CAUSAL_LM", "r": 8}
# PEFT has no decoder tests of these two.
MORE_ADAPTERS = [
    (decoders.LoraConfig, {**_LORA, "use_dora": True, "target_modules": WIDE}),
    # PEFT adds a bias only to a layer that has one.
    (decoders.LoraConfig, {**_LORA, "lora_bias": True, "target_modules": ["z_proj"]}),
]


def _for_students(config_class: type, settings: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Name the modules that an adapter of PEFT's tests goes into."""
    settings = dict(settings)
    fields = {field.name for field in dataclasses.fields(config_class)}
    # ShadowPEFT wraps whole layers.
    if "target_modules" in fields and config_class is not decoders.ShadowConfig:
        settings["target_modules"] = TARGETS.get(config_class, WIDE)
    if "feedforward_modules" in fields:
        settings["feedforward_modules"] = []
    return config_class, settings


def _adapters() -> list[tuple[type, dict[str, Any]]]:
    """List the adapters to test."""
    adapters = []
    wanted = list(FEW_ADAPTERS)
    for config_class, settings in decoders.ALL_CONFIGS:
        if ALL or config_class in wanted:
            adapters.append(_for_students(config_class, settings))
        if config_class in wanted:
            wanted.remove(config_class)
    return adapters + MORE_ADAPTERS


ALL_ADAPTERS = decoders.ALL_CONFIGS + MORE_ADAPTERS
# PEFT's decorators hold these very lists.
decoders.ALL_CONFIGS[:] = _adapters()
decoders.PEFT_DECODER_MODELS_TO_TEST[:] = [kind.name for kind in KINDS]


def _runs_on_students(test: Any) -> bool:
    marks = getattr(test, "pytestmark", [])
    return any(mark.args[1] is decoders.PEFT_DECODER_MODELS_TO_TEST for mark in marks)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind of student."""
    folder = tmp_path_factory.mktemp("students")
    for kind in KINDS:
        make_student(kind, D_STATE, **SHAPE).save_pretrained(folder / kind.name)
        byte_tokenizer().save_pretrained(folder / kind.name)
    return folder


class TestAdapters(decoders.TestDecoderModels):
    """PEFT's tests with a model as a parameter; those of one certain model are left out."""

    @pytest.fixture(autouse=True)
    def names_are_folders(self, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run beside the checkpoints: paths differ between workers, names of tests must not."""
        monkeypatch.chdir(folders)


def adapter_name(config_class: type, settings: dict[str, Any]) -> str:
    """Return an adapter's name in `peer_skips.SKIPS`: its class, and what `MORE_ADAPTERS` set."""
    options = [option for option in ("use_dora", "lora_bias") if option in settings]
    return " ".join([config_class.__name__, *options])


def _name_of(
    test: str,
    case: Any,
    *,
    model_id: str,
    config_cls: type,
    config_kwargs: dict[str, Any],
    **others: Any,
) -> str:
    return f"{model_id}::{test}[{adapter_name(config_cls, config_kwargs)}]"


for _test in dir(decoders.TestDecoderModels):
    if _test.startswith("test_"):
        _function = getattr(decoders.TestDecoderModels, _test)
        _replacement = None
        if _runs_on_students(_function):
            _replacement = checked(_function, functools.partial(_name_of, _test))
        setattr(TestAdapters, _test, _replacement)
