"""Shared by every test: one thread, one seed, no network, tiny random models of each family."""

from __future__ import annotations

import contextlib
import multiprocessing
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when triton is imported, which transformers does. With 0, tests/kernels run on a GPU
# (benchmarks/gpu_kernels.py).
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

COMPILED = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
"""Environment of a process in which triton compiles."""

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "olmo3", "phi", "phi3", "gpt_neox")

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    # Qwen3's head_dim is its own setting: here heads * head_dim (128) is not the model width (64).
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": {},
    "phi": {},
    "phi3": {},
    "gpt_neox": {"num_key_value_heads": None},  # it has none of its own
    "gemma2": {"head_dim": 8},
    "gemma3": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "llama4": {
        "head_dim": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 0],
    },
    "stablelm": {},
}
_CLASS_PREFIX = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi": "Phi",
    "phi3": "Phi3",
    "gpt_neox": "GPTNeoX",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
    "nemotron": "Nemotron",
    "llama4": "Llama4Text",
    "stablelm": "StableLm",
}


def make_family_model(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a random float32 model of a family in eval mode; ``overrides`` are of its config.

    Every vector is drawn too: biases of zero and norm weights of one would hide a tensor that was
    not copied.
    """
    from hybrid_distill.export.versions import oldest_transformers, release

    if release(transformers.__version__) < release(oldest_transformers(name)):
        pytest.skip(f"{name} needs transformers {oldest_transformers(name)}")
    shape = {**_SHAPE, **_FAMILY_SHAPE[name], **overrides}
    if name == "olmo3":
        # Every other layer has a window.
        kinds = ["sliding_attention", "full_attention"] * shape["num_hidden_layers"]
        shape = {"layer_types": kinds[: shape["num_hidden_layers"]], **shape}
    prefix = _CLASS_PREFIX[name]
    config = getattr(transformers, f"{prefix}Config")(**shape)
    model_class = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        if name.startswith("olmo"):
            # These norm what a layer adds. At unit size it would bring tiny heads' rounding up to
            # the logits' size.
            for block in model.model.layers:
                block.post_attention_layernorm.weight.mul_(0.1)
                block.post_feedforward_layernorm.weight.mul_(0.1)
    return model.float().eval()


@pytest.fixture
def family_model() -> Callable[..., PreTrainedModel]:
    """``family_model("qwen3", num_hidden_layers=2)``: see `make_family_model`."""
    return make_family_model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Runs the test once for each supported family."""
    return request.param


@pytest.fixture(autouse=True)
def _on_a_gpu_if_asked() -> Iterator[None]:
    if os.environ["TRITON_INTERPRET"] == "1" or not torch.cuda.is_available():
        yield
    else:
        with torch.device("cuda"):
            yield


@pytest.fixture(autouse=True)
def _one_thread_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def set_cpu_bf16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that sets whether torch finds bfloat16 instructions in this CPU."""

    def set_native(is_native: bool) -> None:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)

    return set_native


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show what a kernel forgets to write: ``torch.empty`` and ``empty_like`` return NaN."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)

        def poisoned(*args, plain=plain, **kwargs):
            tensor = plain(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture(scope="session")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File that ranks the embedded teacher's circuit first; tests/cli/test_score.py finds it."""
    from hybrid_distill.scoring import HeadScores

    drop_LH = torch.zeros(6, 8, dtype=torch.float64)
    for place, head in enumerate([(2, 6), (0, 1), (5, 5), (1, 2)]):
        drop_LH[head] = 0.9 - 0.1 * place
    nothing_LH = torch.zeros_like(drop_LH)
    path = tmp_path_factory.mktemp("scores") / "scores.json"
    HeadScores(4, drop_LH, nothing_LH, None, nothing_LH, nothing_LH, None).save(path)
    return path


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models with recurrent layers and the embedded tokenizer, a folder each."""
    from test_head_sites import FAMILIES as SETTINGS
    from test_head_sites import make_model

    from hybrid_distill.teacher import load_teacher

    folder = tmp_path_factory.mktemp("models")
    _, tokenizer = load_teacher("tiny")
    for family in ("falcon_h1", "zamba2", "mamba2", "falcon_mamba"):
        model = make_model(family)
        config = type(model.config)(**{**SETTINGS[family].config, "vocab_size": len(tokenizer)})
        type(model)(config).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return folder


@pytest.fixture(autouse=True)
def watch(request: pytest.FixtureRequest) -> Iterator[object]:
    """Run interpreted kernels in a random order; check bounds, and races between programs."""
    interpreted = False
    if request.path.parent.name == "kernels":
        with contextlib.suppress(ModuleNotFoundError):  # triton
            from hybrid_kernels.common import INTERPRETED as interpreted
    if not interpreted:
        yield None
        return
    from race import watched

    with watched() as watching:
        yield watching


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., object]]:
    """Call a function in a process in which triton compiles, into its own cache.

    Each module has its own process: the emulator's kernels have no machine code.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
    ):
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        for name, value in COMPILED.items():
            patch.setenv(name, value)
        process.submit(os.getpid).result()  # starts it
        patch.undo()
        yield lambda function, *arguments: process.submit(function, *arguments).result()
