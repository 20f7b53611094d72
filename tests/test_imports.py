"""Imports point one way: a module may use its own layer and the layers before it, never a later one."""

import ast
import graphlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports

import hybrid_distill

ROOT = Path(__file__).parent.parent
LAYERS = (
    ("io", "limits", "locking", "provenance", "devices", "exchange", "distributed", "progress", "vocabulary"),
    ("assets", "model", "plan"),
    ("guard", "kernels"),
    ("teacher",),
    ("student", "probes"),
    ("data",),
    ("scoring", "train"),
    ("evaluation",),
    ("export",),
    ("config", "pipeline"),
    ("lab",),
    ("cli", "__main__"),
)
"""Folders and files of the package, bottom to top."""
LAYER_OF = {f"hybrid_distill.{unit}": number for number, units in enumerate(LAYERS) for unit in units}
OPTIONAL = {
    "deepspeed", "wandb", "trackio", "tensorboard", "lm_eval", "matplotlib", "mamba_ssm", "flash_attn", "torchao",
    "causal_conv1d", "triton", "submitit", "gguf", "onnx_ir", "onnxscript", "onnxruntime", "llama_cpp", "mlx", "mlx_lm",
    "vllm",
}  # fmt: skip
MODEL_MAY_IMPORT = {"torch", "transformers", *sys.stdlib_module_names}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names that a file imports; ``lazy=False`` skips functions and TYPE_CHECKING blocks."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)
        is_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if lazy or not is_lazy:
            pending.extend(ast.iter_child_nodes(node))


def unit_of(dotted: str) -> str:
    """The folder or file of the package that a dotted name lies in."""
    return ".".join(dotted.split(".")[:2])


def unit_of_file(path: Path) -> str:
    return unit_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def used_units(path: Path, *, lazy: bool = True) -> set[str]:
    own = {name for name in imports(path, lazy=lazy) if name.split(".")[0] == "hybrid_distill"}
    return {unit_of(name) for name in own} - {unit_of_file(path)}


SHIPPED = [ROOT / "hybrid_distill/export" / name for name in ("mlx_model.py", "onnx_generate.py")]
"""Programs that travel with exports, and run where this package is not."""
PACKAGE = [path for path in files("hybrid_distill") if path not in (ROOT / "hybrid_distill/__init__.py", *SHIPPED)]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_uses_no_later_layer_and_imports_optional_libraries_where_it_uses_them(path: Path) -> None:
    assert not OPTIONAL & {name.split(".")[0] for name in imports(path, lazy=False)}
    unit = unit_of_file(path)
    assert unit in LAYER_OF, "a new module: give it a place in LAYERS"
    for used in used_units(path):
        assert used in LAYER_OF, f"imports {used}: not in LAYERS, or a name taken from the package root"
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
        engines = {"ssd.py": ("hybrid_kernels", "mamba_ssm"), "gated_delta.py": ("fla",)}
        kernels = name.startswith(engines.get(path.name, ()))
        assert own or kernels or name.split(".")[0] in MODEL_MAY_IMPORT, f"imports {name}"


def test_kernels_are_imported_in_few_places_and_those_of_triton_only_where_they_are_called() -> None:
    everywhere = [*files("hybrid_distill"), *files("recipes")]
    users = {path for path in everywhere if any(n.startswith("hybrid_kernels") for n in imports(path))}
    known = {"ssd.py", "losses.py", "end_to_end.py", "loop.py", "exact.py", "caching.py", "kernels.py"}
    assert {path.name for path in users} <= known
    for path in users:
        at_once = {n.split(".")[1] for n in imports(path, lazy=False) if n.startswith("hybrid_kernels")}
        assert at_once <= {"loss", "products"}, "all others need triton"


def test_kernels_do_not_know_the_package() -> None:
    assert not (ROOT / "kernels/__init__.py").exists(), "it would shadow the Hugging Face library"
    for path in files("kernels"):
        roots = {name.split(".")[0] for name in imports(path)}
        # A relative import reads as kernels.hybrid_kernels here, for the folder is a source root.
        assert roots <= {"torch", "triton", "hybrid_kernels", "kernels", *sys.stdlib_module_names}, path


@pytest.mark.parametrize(
    "policy, load, waiting",
    [
        (None, "0.10 0.1 0.1 3/90 7", {"GOMP_SPINCOUNT": "1000"}),
        (None, "1.90 0.1 0.1 1/90 7", {"GOMP_SPINCOUNT": "1000"}),
        (None, "1.90 0.1 0.1 2/90 7", {"OMP_WAIT_POLICY": "passive"}),
        ("active", "1.90 0.1 0.1 2/90 7", {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_waiting_threads_sleep_on_a_busy_machine_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, policy: str | None, load: str, waiting: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", {} if policy is None else {"OMP_WAIT_POLICY": policy})
    monkeypatch.setattr(Path, "read_text", lambda path: load)
    importlib.reload(hybrid_distill)
    assert os.environ == waiting
