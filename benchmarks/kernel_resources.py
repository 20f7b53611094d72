"""Compile every kernel configuration ahead of time and record the resources it needs; no GPU is needed.

    python benchmarks/kernel_resources.py            # writes benchmarks/results/kernel_resources.json
    python benchmarks/kernel_resources.py --only "ssd backward CBX N=64"

For every entry of the kernels' tile tables and each architecture: registers a thread, spill instructions, shared
memory, programs on a multiprocessor, tensor-core instructions and barriers of the main loop, read from the binary. The
file has one section for each version of triton it was run with, and the digest of the sources it belongs to. Exit code
1 when a configuration breaks a promise: more spills than its tile table accepts or fewer resident programs than it
counts on (under the triton it was chosen by), more shared memory than a multiprocessor has, no tensor-core instruction
where one is wanted. tests/kernels/test_compiled.py checks that the file is complete and keeps these promises.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

# Read when triton is imported: interpreted kernels cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import hybrid_kernels
import triton
from kernel_time import GPUS, Code, decode, programs_per_processor
from records import RESULTS, parser_of, read, write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

RECORD = RESULTS / "kernel_resources.json"
CAPABILITIES = (80, 90)
# The version the tile tables were chosen by; how much another one spills is recorded, no more.
TABLE_TRITON = "3.6.0"
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


def kernel_modules() -> Iterator[ModuleType]:
    """Yield those of `hybrid_kernels` that list their configurations."""
    for info in pkgutil.iter_modules(hybrid_kernels.__path__):
        module = importlib.import_module(f"hybrid_kernels.{info.name}")
        if hasattr(module, "compilations"):
            yield module


def digest(module: ModuleType) -> str:
    """Hash the code of the kernels and of what they share, without comments, docstrings and the code around them."""
    hashed = hashlib.sha256()
    for source in (importlib.import_module("hybrid_kernels.common"), module):
        tree = ast.parse(Path(str(source.__file__)).read_text())
        for node in tree.body:
            if is_kernel(node):
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
                hashed.update(repr(tree_of(node)).encode())
    return hashed.hexdigest()[:16]


def tree_of(part: Any) -> Any:
    """Return a part of a syntax tree as nested lists.

    Every version of Python returns the same: newer ones add fields that are empty, and `ast.dump` prints them.
    """
    if isinstance(part, ast.AST):
        fields = []
        for name, value in ast.iter_fields(part):
            if value is not None and value != []:
                fields.append([name, tree_of(value)])
        return [type(part).__name__, fields]
    if isinstance(part, list):
        return [tree_of(entry) for entry in part]
    return repr(part)


def is_kernel(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    if not isinstance(node, ast.FunctionDef):
        return False
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def key(compilation: Any) -> str:
    """Return the launch settings and arguments: with the sources, they decide the result."""
    arguments = ", ".join(f"{name}={value}" for name, value in compilation.arguments.items())
    return f"{compilation.num_warps} warps, {compilation.num_stages} stages, {arguments}"


def compile_for(compilation: Any, capability: int, target: GPUTarget | None = None) -> Any:
    """Return the compiled kernel; for another maker's GPU if ``target`` says so."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, (name, value) in enumerate(compilation.arguments.items()):
        is_constant = name in compilation.constants
        signature[name] = "constexpr" if is_constant else str(value)
        if is_constant:
            constants[place,] = value
        if name in compilation.divisible:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(compilation.kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": compilation.num_warps, "num_stages": compilation.num_stages}
    return triton.compile(
        source, target=target or GPUTarget("cuda", capability, 32), options=options
    )


def code_of(compilation: Any, capability: int) -> Code:
    """Compile and disassemble."""
    compiled = compile_for(compilation, capability)
    return decode(compiled.asm["cubin"], compiled.metadata.shared)


def resources(compilation: Any, capability: int) -> dict[str, int]:
    """Read from the binary with the tools that come with triton."""
    code = code_of(compilation, capability)
    on_tensor_cores = [i for i in code.instructions if i.operation.startswith(("HGMMA", "HMMA"))]
    return {
        "registers": code.registers,
        "spills": code.spills,
        "shared_bytes": code.shared_bytes,
        "resident": programs_per_processor(code, compilation.num_warps, GPUS[capability]),
        "tensor_core_instructions": len(on_tensor_cores),
        "instructions": len(code.instructions),
        "barriers_of_loop": code.count("BAR"),
    }


def broken_promises(
    compilation: Any, capability: int, version: str, used: dict[str, int]
) -> list[str]:
    """Return the broken promises in words; empty if all are kept."""
    broken = []
    if version == TABLE_TRITON and used["spills"] > compilation.max_spills:
        broken.append(f"{used['spills']} spill instructions, {compilation.max_spills} accepted")
    if used["shared_bytes"] > MAX_SHARED_BYTES[capability]:
        broken.append(
            f"{used['shared_bytes']} bytes of shared memory, {MAX_SHARED_BYTES[capability]} exist"
        )
    if version == TABLE_TRITON and used["resident"] < compilation.min_resident:
        broken.append(
            f"{used['resident']} programs on a multiprocessor, {compilation.min_resident} in the tile table"
        )
    if compilation.tensor_cores and not used["tensor_core_instructions"]:
        broken.append("no tensor-core instruction")
    return [f"sm_{capability} {compilation.name}: {problem}" for problem in broken]


class Wanted(NamedTuple):
    """A configuration that the file must have: of which module, for which architecture."""

    module: str
    digest: str
    capability: int
    compilation: Any


def wanted() -> Iterator[Wanted]:
    """Yield every configuration of every module."""
    for module in kernel_modules():
        name = module.__name__.rpartition(".")[2]
        current = digest(module)
        for capability in CAPABILITIES:
            for compilation in module.compilations(capability):
                yield Wanted(name, current, capability, compilation)


def recorded(section: dict[str, Any], one: Wanted) -> dict[str, Any] | None:
    """Return a configuration's row, or None if there is none of today's sources and settings."""
    entry = section.get(one.module, {})
    if entry.get("digest") != one.digest:
        return None
    row = entry.get(f"sm_{one.capability}", {}).get(one.compilation.name, {})
    return row if row.get("key") == key(one.compilation) else None


def check(record: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the promises that the record's configurations break, and the configurations that it does not have."""
    broken = []
    missing = []
    versions = [name for name in record if name.startswith("triton")]
    for version in versions or ["triton of any version"]:
        for one in wanted():
            row = recorded(record.get(version, {}), one)
            if row is None:
                missing.append(f"{version} sm_{one.capability} {one.compilation.name}")
            else:
                broken += broken_promises(
                    one.compilation, one.capability, version.removeprefix("triton "), row
                )
    return broken, missing


def still_valid(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section without the rows of older sources and of configurations that are gone."""
    valid: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    for one in wanted():
        entry = valid.setdefault(one.module, {"digest": one.digest})
        rows = entry.setdefault(f"sm_{one.capability}", {})
        row = recorded(section, one)
        if row is not None:
            rows[one.compilation.name] = row
    return valid


def main() -> None:
    """Compile, print, write the JSON; exit code 1 when a promise is broken."""
    parser = parser_of(__doc__, RECORD)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    options = parser.parse_args()

    record = read(options.out)
    version = f"triton {triton.__version__}"
    section = still_valid(record.get(version, {}))
    record[version] = section
    broken = []
    for one in wanted():
        if options.only not in one.compilation.name:
            continue
        used = resources(one.compilation, one.capability)
        broken += broken_promises(one.compilation, one.capability, triton.__version__, used)
        print(f"sm_{one.capability} {one.compilation.name}: {used}", flush=True)
        section[one.module][f"sm_{one.capability}"][one.compilation.name] = {
            "key": key(one.compilation),
            **used,
        }
        # Compiling everything takes minutes: what is there is kept if it is stopped.
        write(options.out, record, sort_keys=True)
    if broken:
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()
