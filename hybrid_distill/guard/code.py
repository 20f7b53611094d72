"""Code that travels with a checkpoint: read as text, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MODEL_CODE = Path(__file__).parents[1] / "model"
ALLOWED = frozenset((
    "__future__", "collections", "functools", "importlib", "itertools", "logging", "math", "reprlib", "types", "typing",
    "torch", "transformers",
))  # fmt: skip
"""What a student's code may import, besides the files beside it."""
ALLOWED_KERNELS = ("hybrid_kernels.", "mamba_ssm.")
"""Packages that it may import by a name written out in the call, when they are installed."""
FORBIDDEN_NAMES = frozenset((
    "eval", "exec", "compile", "open", "breakpoint", "globals", "locals", "vars", "delattr", "__import__",
    "__builtins__",
))  # fmt: skip
FORBIDDEN_ATTRIBUTES = frozenset((
    "hub", "cpp_extension", "load_library", "serialization", "dynamic_module_utils", "modules", "loader", "machinery",
    "sys", "os", "subprocess", "__globals__", "__builtins__", "__subclasses__", "__loader__", "__code__",
))  # fmt: skip
FORBIDDEN_CALLS = frozenset(("torch.load", "torch.save", "torch.compile", "importlib.reload", "importlib.__import__"))


def review_code(path: Path) -> list[str]:
    """What a file does that a student's code has no need to do, one line each; none for ours.

    Imports beyond a short list, other ways to import, to read files and to run text. A file that passes is not proven
    harmless: this shows carelessness and simple malice.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        return [f"is no Python ({error})"]
    return [f"{text} (line {getattr(node, 'lineno', 0)})" for node in ast.walk(tree) for text in _objections(node)]


def _objections(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (f"imports {name}" for name in imported_names(node) if name not in ALLOWED and name[0] != ".")
    elif isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
        yield f"uses {node.id}"
    elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
        yield f"uses {ast.unparse(node)}"
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in FORBIDDEN_CALLS:
            yield f"calls {called}"
        if called == "importlib.import_module" and not _is_named_kernel(node):
            yield f"imports {', '.join(map(ast.unparse, node.args)) or 'something'} by name"


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Packages that a statement imports; ".name" for a file beside it."""
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "").split(".")[0]]
    return [alias.name.split(".")[0] for alias in node.names]


def _is_named_kernel(call: ast.Call) -> bool:
    argument = call.args[0] if len(call.args) == 1 and not call.keywords else None
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    return isinstance(argument, ast.Constant) and str(argument.value).startswith(ALLOWED_KERNELS)


def code_differs(folder: Path) -> list[str]:
    """Names of the Python files beside a checkpoint's weights that are not, byte for byte, this package's own."""
    return [path.name for path in sorted(folder.glob("*.py")) if not _is_ours(path)]


def _is_ours(path: Path) -> bool:
    own = MODEL_CODE / path.name
    return own.is_file() and own.read_bytes() == path.read_bytes()
