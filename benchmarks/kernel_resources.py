"""Compile every kernel configuration ahead of time and record the resources it needs; no GPU is needed.

    python benchmarks/kernel_resources.py            # writes benchmarks/results/kernel_resources.json
    python benchmarks/kernel_resources.py --only "ssd backward CBX N=64"
    python benchmarks/kernel_resources.py --check    # compiles nothing: is the file complete, and are promises kept?

For every entry of the kernels' tile tables and each architecture: registers a thread, spill instructions, shared
memory, programs on a multiprocessor, tensor-core instructions and barriers of the main loop, read from the binary. The
file has one section for each version of triton it was run with, and the digest of the sources it belongs to. Exit code
1 when a configuration breaks a promise: more spills than its tile table accepts or fewer resident programs than it
counts on (under the triton it was chosen by), more shared memory than a multiprocessor has, no tensor-core instruction
where one is wanted.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported: interpreted kernels cannot be compiled

import hybrid_kernels
import triton
from kernel_time import GPUS, Code, decode, programs_per_processor
from provenance import read, write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

RESULTS = Path(__file__).parent / "results" / "kernel_resources.json"
CAPABILITIES = (80, 90)
TABLE_TRITON = "3.6.0"  # the version the tile tables were chosen by; how much another one spills is recorded, no more
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


def kernel_modules() -> Iterator[ModuleType]:
    """Those of `hybrid_kernels` that list their configurations."""
    for found in pkgutil.iter_modules(hybrid_kernels.__path__):
        module = importlib.import_module(f"hybrid_kernels.{found.name}")
        if hasattr(module, "compilations"):
            yield module


def digest(module: ModuleType) -> str:
    """Hash the code of the kernels and of what they share, without comments, docstrings and the code around them."""
    hashed = hashlib.sha256()
    for source in (importlib.import_module("hybrid_kernels.common"), module):
        for node in ast.parse(Path(str(source.__file__)).read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
                hashed.update(ast.dump(node).encode())
    return hashed.hexdigest()[:16]


def key(compilation: Any) -> str:
    """Return the launch settings and arguments: with the sources, they decide the result."""
    arguments = ", ".join(f"{name}={value}" for name, value in compilation.arguments.items())
    return f"{compilation.num_warps} warps, {compilation.num_stages} stages, {arguments}"


def compile_for(compilation: Any, capability: int, target: GPUTarget | None = None) -> Any:
    """The compiled kernel; for another maker's GPU if ``target`` says so."""
    names = list(compilation.arguments)
    source = ASTSource(
        fn=compilation.kernel,
        signature={
            name: "constexpr" if name in compilation.constants else str(value)
            for name, value in compilation.arguments.items()
        },
        constexprs={(names.index(name),): compilation.arguments[name] for name in compilation.constants},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in compilation.divisible},
    )
    options = {"num_warps": compilation.num_warps, "num_stages": compilation.num_stages}
    return triton.compile(source, target=target or GPUTarget("cuda", capability, 32), options=options)


def code_of(compilation: Any, capability: int) -> Code:
    """Compile and disassemble."""
    compiled = compile_for(compilation, capability)
    return decode(compiled.asm["cubin"], compiled.metadata.shared)


def resources(compilation: Any, capability: int) -> dict[str, int]:
    """Read from the binary with the tools that come with triton."""
    code = code_of(compilation, capability)
    return {
        "registers": code.registers,
        "spills": code.spills,
        "shared_bytes": code.shared_bytes,
        "resident": programs_per_processor(code, compilation.num_warps, GPUS[capability]),
        "tensor_core_instructions": sum(i.operation.startswith(("HGMMA", "HMMA")) for i in code.instructions),
        "instructions": len(code.instructions),
        "barriers_of_loop": code.count("BAR"),
    }


def broken_promises(compilation: Any, capability: int, version: str, found: dict[str, int]) -> list[str]:
    """In words; empty if all are kept."""
    broken = []
    if version == TABLE_TRITON and found["spills"] > compilation.max_spills:
        broken.append(f"{found['spills']} spill instructions, {compilation.max_spills} accepted")
    if found["shared_bytes"] > MAX_SHARED_BYTES[capability]:
        broken.append(f"{found['shared_bytes']} bytes of shared memory, {MAX_SHARED_BYTES[capability]} exist")
    if version == TABLE_TRITON and found["resident"] < compilation.min_resident:
        broken.append(f"{found['resident']} programs on a multiprocessor, {compilation.min_resident} in the tile table")
    if compilation.tensor_cores and not found["tensor_core_instructions"]:
        broken.append("no tensor-core instruction")
    return [f"sm_{capability} {compilation.name}: {problem}" for problem in broken]


def check(record: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the promises that the record's configurations break, and the configurations that it does not have."""
    broken, missing = [], []
    for version in [name for name in record if name.startswith("triton")] or ["triton of any version"]:
        for module in kernel_modules():
            entry = record.get(version, {}).get(module.__name__.rpartition(".")[2], {})
            for capability in CAPABILITIES:
                rows = entry.get(f"sm_{capability}", {}) if entry.get("digest") == digest(module) else {}
                for compilation in module.compilations(capability):
                    row = rows.get(compilation.name, {})
                    if row.get("key") == key(compilation):
                        broken += broken_promises(compilation, capability, version.removeprefix("triton "), row)
                    else:
                        missing.append(f"{version} sm_{capability} {compilation.name}")
    return broken, missing


def main() -> None:
    """Compile, print, write the JSON; exit code 1 when a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES), choices=CAPABILITIES)
    parser.add_argument("--check", action="store_true", help="compile nothing, read the file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    record = read(options.out)
    if options.check:
        broken, missing = check(record)
        print("\n".join(broken) or f"{len(missing)} configurations are not in the file: {missing[:1]}")
        raise SystemExit(1 if broken else 3 if missing else 0)
    section = record.setdefault(f"triton {triton.__version__}", {})
    section["date"] = datetime.date.today().isoformat()
    broken = []
    for module in kernel_modules():
        current = digest(module)
        name = module.__name__.rpartition(".")[2]
        entry = section.get(name, {})
        if entry.get("digest") != current:
            entry = {"digest": current}
        for capability in options.capability:
            rows = entry.get(f"sm_{capability}", {})
            wanted = module.compilations(capability)
            rows = {c.name: rows[c.name] for c in wanted if rows.get(c.name, {}).get("key") == key(c)}
            for compilation in wanted:
                if options.only in compilation.name:
                    found = resources(compilation, capability)
                    rows[compilation.name] = {"key": key(compilation), **found}
                    broken += broken_promises(compilation, capability, triton.__version__, found)
                    print(f"sm_{capability} {compilation.name}: {found}", flush=True)
            entry[f"sm_{capability}"] = rows
        section[name] = entry
        write(options.out, record, sort_keys=True)
    if broken:
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()
