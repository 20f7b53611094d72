"""Imports point one way: a module may use its own layer and those before it, never a later one."""

import ast
import graphlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports

ROOT = Path(__file__).parent.parent
LAYERS = (
    (
        "io",
        "validation",
        "tunable",
        "locking",
        "provenance",
        "distributed",
        "progress",
        "vocabulary",
        "chat_template",
    ),
    ("assets", "model", "plan", "cache_size"),
    ("safe_loading", "export_paths", "kernels"),
    ("teacher",),
    ("student", "probes"),
    ("data",),
    ("scoring", "train"),
    ("evaluation",),
    ("export",),
    ("config", "recipe", "flags", "dependent_options", "stage_flags", "pipeline"),
    ("lab",),
    ("cli", "__main__"),
)
"""Folders and files of the package, bottom to top."""
LAYER_OF: dict[str, int] = {}
for number, units in enumerate(LAYERS):
    LAYER_OF |= {f"hybrid_distill.{unit}": number for unit in units}
OPTIONAL = set(
    """
    deepspeed wandb trackio tensorboard lm_eval matplotlib mamba_ssm flash_attn torchao
    causal_conv1d triton submitit gguf onnx_ir onnxscript onnxruntime llama_cpp mlx mlx_lm vllm
    """.split()
)
# transformers itself does not load without safetensors.
MODEL_MAY_IMPORT = {"torch", "transformers", "safetensors", *sys.stdlib_module_names}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names that a file imports; ``lazy=False`` skips functions and TYPE_CHECKING blocks."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            # Level 1 is the file's own package, level 2 the one around it.
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [node.module] if node.module else []
            for alias in node.names:
                yield ".".join([*base, *module, alias.name])
        if lazy or not is_lazy(node):
            pending.extend(ast.iter_child_nodes(node))


def is_lazy(node: ast.AST) -> bool:
    """Return True for what is not run when its module is imported."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return True
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def unit_of(dotted: str) -> str:
    """The folder or file of the package that a dotted name lies in."""
    return ".".join(dotted.split(".")[:2])


def name_of(path: Path) -> str:
    """Return the dotted name that a file is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def unit_of_file(path: Path) -> str:
    return unit_of(name_of(path))


def used_units(path: Path, *, lazy: bool = True) -> set[str]:
    own = {name for name in imports(path, lazy=lazy) if name.split(".")[0] == "hybrid_distill"}
    return {unit_of(name) for name in own} - {unit_of_file(path)}


EXPORT = ROOT / "hybrid_distill/export"
SHIPPED = (EXPORT / "mlx_model.py", EXPORT / "onnx_generate.py")
"""Programs that travel with exports, and run where this package is not."""
OUTSIDE_LAYERS = (ROOT / "hybrid_distill/__init__.py", *SHIPPED)
PACKAGE = [path for path in files("hybrid_distill") if path not in OUTSIDE_LAYERS]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_uses_no_later_layer_and_imports_optional_libraries_where_it_uses_them(
    path: Path,
) -> None:
    libraries = {name.split(".")[0] for name in imports(path, lazy=False)}
    assert OPTIONAL.isdisjoint(libraries)
    unit = unit_of_file(path)
    assert unit in LAYER_OF, "a new module: give it a place in LAYERS"
    for used in used_units(path):
        assert used in LAYER_OF, (
            f"imports {used}: not in LAYERS, or a name taken from the package root"
        )
        assert LAYER_OF[used] <= LAYER_OF[unit], f"imports {used}, which belongs to a later layer"


def test_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in PACKAGE:
        graph.setdefault(unit_of_file(path), set()).update(used_units(path, lazy=False))
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", files("hybrid_distill/model"), ids=lambda path: path.name)
def test_model_runs_alone_inside_a_checkpoint(path: Path) -> None:
    assert set(get_imports(path)) <= MODEL_MAY_IMPORT, "remote code that imports more does not load"
    for name in imports(path):
        own = name.startswith("hybrid_distill.model.")
        assert own or name.split(".")[0] in MODEL_MAY_IMPORT, f"imports {name}"


def kernels_of(path: Path, *, lazy: bool = True) -> set[str]:
    """Return the modules of kernels that a file imports."""
    names = [name.split(".") for name in imports(path, lazy=lazy)]
    return {parts[1] for parts in names if parts[0] == "hybrid_kernels"}


def test_kernels_are_imported_in_few_places_and_those_of_triton_only_where_called() -> None:
    users = [path for path in (*PACKAGE, *files("recipes")) if kernels_of(path)]
    # `activations.py` plans memory.
    expected = {"losses.py", "end_to_end.py", "kernels.py", "stage_kernels.py", "activations.py"}
    assert {path.name for path in users} <= expected
    without_triton = {"loss", "loss_choice", "loss_chunks", "loss_torch", "loss_types"}
    for path in users:
        assert kernels_of(path, lazy=False) <= without_triton, "all others need triton"


def test_kernels_do_not_know_the_package() -> None:
    assert not (ROOT / "kernels/__init__.py").exists(), "it would shadow the Hugging Face library"
    for path in files("kernels"):
        roots = {name.split(".")[0] for name in imports(path)}
        # A relative import reads as kernels.hybrid_kernels here, for the folder is a source root.
        allowed = {"torch", "triton", "hybrid_kernels", "kernels", *sys.stdlib_module_names}
        assert roots <= allowed, path


# Everything is imported twice. Libraries set what they like when they are loaded, in the first
# pass; this package's own modules must set nothing in the second.
IMPORT_TWICE = """
import importlib, logging, os, signal, sys
import torch

def import_everything():
    for name in sys.argv[1:]:
        importlib.import_module(name)

def loggers():
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]

def state():
    return {
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "logging": [
            (logger.name, logger.level, logger.propagate, logger.disabled)
            for logger in loggers()
            if logger.level or not logger.propagate or logger.disabled
        ],
        "handlers": {logger.name: list(logger.handlers) for logger in loggers() if logger.handlers},
        "disabled": logging.root.manager.disable,
    }

before = state()
import hybrid_distill
assert state() == before, (before, state())
import_everything()
for name in [name for name in sys.modules if name.partition(".")[0] == "hybrid_distill"]:
    del sys.modules[name]
os.environ.clear()
torch.set_num_threads(1)
for logger in loggers():
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
before = state()
import_everything()
assert state() == before, (before, state())
"""


@pytest.mark.launched
def test_importing_the_package_changes_nothing_in_the_process() -> None:
    """Only the command line sets its process's environment, threads, signals and logging."""
    programs = [
        *files("hybrid_distill/cli"),
        *(ROOT / "hybrid_distill").rglob("__main__.py"),
    ]
    modules = [name_of(path) for path in PACKAGE if path not in programs]
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_TWICE, *modules], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.launched
@pytest.mark.parametrize(
    ("given", "waiting"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_a_program_sets_how_its_threads_wait_before_torch_is_loaded(
    given: dict[str, str], waiting: dict[str, str]
) -> None:
    """libgomp reads these variables once, when torch is imported; a user's own values stay."""
    script = """
import json, os, sys
import hybrid_distill.cli
names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
waiting = {name: os.environ[name] for name in names if name in os.environ}
print(json.dumps([waiting, "torch" in sys.modules]))
"""
    environment = {**os.environ, **given}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        if name not in given:
            environment.pop(name, None)
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert json.loads(process.stdout) == [waiting, False]
