"""Measure the house: lines by area, the files of one training step, floors of imports, time of --help and of the tests.

python benchmarks/house.py            # writes benchmarks/results/house.json
python benchmarks/house.py --tests    # runs the tests too, for their time; needs an idle machine
"""

from __future__ import annotations

import argparse
import ast
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx
from provenance import ROOT, about, read, write

RESULTS = ROOT / "benchmarks/results/house.json"
PACKAGE = sorted((ROOT / "hybrid_distill").rglob("*.py"))
SPINE = ("config.py", "pipeline", "plan.py", "model", "teacher", "student", "train")
# The first version, and the targets of the design.
FIRST = {
    "package_lines": 26_679, "tests_lines": 16_626, "step_files": 20, "step_lines": 6_131, "floors": 17,
    "upward_imports": 4, "circles": 3, "any_or_cast": 574, "help_cpu_s": 7.7,
}  # fmt: skip
TARGET = {
    "package_lines": 16_000, "spine_lines": 6_000, "tests_lines": 12_000, "step_files": 10, "step_lines": 2_500,
    "floors": 12, "upward_imports": 0, "circles": 0, "any_or_cast": 60, "help_cpu_s": 0.3, "tests_minutes": 10,
}  # fmt: skip


def lines(path: Path) -> int:
    """Count the lines of a Python file, or of all below a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text().splitlines()) for file in files)


def lines_by_area() -> dict[str, int]:
    """Count the lines of every folder and file of the package; the lab's folders one by one."""
    areas: Counter[str] = Counter()
    for file in PACKAGE:
        parts = file.relative_to(ROOT / "hybrid_distill").parts
        areas["/".join(parts[:2]) if parts[0] == "lab" else parts[0]] += lines(file)
    return dict(areas.most_common())


def step_files() -> list[str]:
    """Return the files of one training step: the section "How a batch travels" of docs/architecture.md lists them."""
    section = (ROOT / "docs/architecture.md").read_text().split("## How a batch travels")[1].split("\n## ")[0]
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", section)))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(file: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, in functions too, but for TYPE_CHECKING blocks."""
    package = module_name(file).split(".")
    package = package if file.name == "__init__.py" else package[:-1]
    names = {module_name(other) for other in PACKAGE}
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                module = f"{source}.{alias.name}" if f"{source}.{alias.name}" in names else source
                if module in names:
                    yield module
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            pending.extend(ast.iter_child_nodes(node))


def graph() -> networkx.DiGraph:
    """Return the files as nodes, with an arrow from each to every file that it imports."""
    files = networkx.DiGraph()
    for file in PACKAGE:
        files.add_node(module_name(file))
        files.add_edges_from((module_name(file), used) for used in imports(file) if used != module_name(file))
    return files


def unit(module: str) -> str:
    """Return the folder or file of the package that a module lies in; the folders of the lab count one by one."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["lab"] else parts[:1])


def units(files: networkx.DiGraph) -> networkx.DiGraph:
    """Return the folders as nodes, with an arrow for every import between two of them."""
    folders = networkx.DiGraph()
    folders.add_edges_from((unit(a), unit(b)) for a, b in files.edges if unit(a) != unit(b) and unit(b))
    return folders


def upward_imports(files: networkx.DiGraph) -> list[str]:
    """Return the arrows that run to a later layer of tests/test_imports.py."""
    tree = ast.parse((ROOT / "tests/test_imports.py").read_text())
    layers = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    floor = {unit: number for number, units in enumerate(layers) for unit in units}

    def of(module: str) -> int:
        return floor.get((module.split(".") + ["__main__"])[1], len(layers))

    return [f"{a} -> {b}" for a, b in files.edges if b != "hybrid_distill" and of(b) > of(a)]


def count_any_or_cast() -> int:
    """Count uses of ``Any`` and ``cast`` outside model/."""
    used = 0
    for file in PACKAGE:
        if "model" not in file.parts:
            nodes = ast.walk(ast.parse(file.read_text()))
            used += sum(isinstance(node, ast.Name) and node.id in ("Any", "cast") for node in nodes)
    return used


def cpu_seconds(*command: str) -> float:
    """Run a command; return the CPU time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)


def measure(with_tests: bool) -> dict[str, Any]:
    """Return every number of the target table."""
    files = graph()
    folders = units(files)
    floors = networkx.condensation(folders)
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(files) if len(circle) > 1]
    steps = step_files()
    found: dict[str, Any] = {
        "package_lines": lines(ROOT / "hybrid_distill"),
        "package_files": len(PACKAGE),
        "spine_lines": sum(lines(ROOT / "hybrid_distill" / part) for part in SPINE),
        "tests_lines": lines(ROOT / "tests"),
        "step_files": len(steps),
        "step_lines": sum(lines(ROOT / "hybrid_distill" / file) for file in steps),
        "floors": networkx.dag_longest_path_length(floors) + 1,
        "arrows": folders.number_of_edges(),
        "upward_imports": len(upward_imports(files)),
        "circles": len(circles),
        "any_or_cast": count_any_or_cast(),
        "help_cpu_s": min(cpu_seconds(sys.executable, "-m", "hybrid_distill", "--help") for _ in range(5)),
        "lines_by_area": lines_by_area(),
        "upward": upward_imports(files),
        "circles_of_files": circles,
        "longest_path": [sorted(floors.nodes[n]["members"])[0] for n in networkx.dag_longest_path(floors)],
    }
    if with_tests:
        begun = time.monotonic()
        subprocess.run(["make", "test"], check=True, cwd=ROOT)
        found["tests_minutes"] = round((time.monotonic() - begun) / 60, 1)
    return found


def main() -> None:
    """Print the target table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="run `make test` and record its time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = measure(options.tests)
    if "tests_minutes" not in found and options.out.exists():
        found["tests_minutes"] = read(options.out)["now"].get("tests_minutes")
    print(f"{'':16}{'first':>8}{'now':>8}{'target':>8}")
    for name, target in TARGET.items():
        print(f"{name:16}{FIRST.get(name, '-'):>8}{found.get(name) or 0:>8}{target:>8}")
    write(options.out, {"first_version": FIRST, "target": TARGET, "now": found, **about("the house")})


if __name__ == "__main__":
    main()
