"""Other projects' tests, from their source distributions, imported as packages of their own.

Wheels do not hold tests, and this repository holds no copy of them. ``make test`` and
``make peers`` run this file, which downloads the source distributions of the installed versions to
build/peers, where they stay; nothing else here needs a network.

transformers' distribution holds only the files directly below ``tests``. `STAND_INS` replace what
these import from folders. So its tests of ``generate`` (ours: tests/model/test_generation.py), of
exporters, of tensor parallelism and of FSDP do not run here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

PACKAGES = ("transformers", "peft")
SCRIPT = "tests/peers/peer_sources.py"
FOLDER = Path(__file__).parents[2] / "build" / "peers"


class GenerationTesterMixin:
    """Stand-in for transformers' tests of ``generate``, which no source distribution holds.

    tests/model/test_generation.py has ours.
    """


class ExportTesterMixin:
    """Stand-in for transformers' tests of its exporters, which no source distribution holds."""


# Values that a config of any class must store. transformers' own list is not distributed.
CONFIG_VALUES = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["HybridForCausalLM"],
    "id2label": {0: "no", 1: "yes", 2: "unknown"},
    "label2id": {"no": 0, "yes": 1, "unknown": 2},
    "problem_type": "regression",
}

# Per missing module, below the package of tests: the names that the present files import from it.
STAND_INS: dict[str, dict[str, Any]] = {
    "exporters.test_export": {"ExportTesterMixin": ExportTesterMixin},
    "generation.test_utils": {"GenerationTesterMixin": GenerationTesterMixin},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_VALUES},
}
# PEFT's common file imports this at its top, for tests of image models.
UNUSED = {"diffusers": {"StableDiffusionPipeline": type("StableDiffusionPipeline", (), {})}}


class NotFetched(RuntimeError):
    """The source distribution of the installed version is not in build/peers."""


def archive(package: str) -> Path:
    """Return where the source distribution of the installed version belongs."""
    return FOLDER / f"{package}-{version(package)}.tar.gz"


def fetch(package: str) -> None:
    """Download the source distribution of the installed version, unless it is there."""
    if archive(package).is_file():
        return
    requirement = f"{package}=={version(package)}"
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        package,
    ]
    subprocess.run([*download, "--dest", str(FOLDER), requirement], check=True)
    if not archive(package).is_file():
        raise NotFetched(f"pip downloaded {requirement}, but not to {archive(package).name}")


def unpack(package: str) -> Path:
    """Return the folder of the installed version's tests; unpack it first if needed.

    Raises `NotFetched` without the source distribution.
    """
    packed = archive(package)
    if not packed.is_file():
        raise NotFetched(
            f"build/peers has no source distribution of {package} {version(package)}; "
            f"run python {SCRIPT}."
        )
    unpacked = FOLDER / packed.name.removesuffix(".tar.gz")
    done = unpacked / ".unpacked"
    with FileLock(f"{packed}.lock"):  # several pytest workers
        if not done.is_file():
            with tarfile.open(packed) as source:
                source.extractall(FOLDER, filter="data")
            # test_configuration_common imports "the package of this folder", which nothing uses.
            (unpacked / "tests" / "__init__.py").touch()
            done.touch()
    return unpacked / "tests"


def import_tests(package: str, name: str) -> ModuleType:
    """Import a file of a package's tests as ``{package}_tests.{name}``.

    Without the source distribution, skip the importing module; under ``make``, which fetches it,
    raise `NotFetched`.
    """
    try:
        return _import_tests(package, name)
    except NotFetched as error:
        if "PEERS" in os.environ:
            raise
        pytest.skip(str(error), allow_module_level=True)


def _import_tests(package: str, name: str) -> ModuleType:
    root = f"{package}_tests"
    if root not in sys.modules:
        tests = ModuleType(root)
        tests.__path__ = [str(unpack(package))]
        sys.modules[root] = tests
        _put_stand_ins(root)
    with _unused_modules():
        return importlib.import_module(f"{root}.{name}")


def _put_stand_ins(root: str) -> None:
    for path, names in STAND_INS.items():
        parent, _, _ = path.partition(".")
        if importlib.util.find_spec(f"{root}.{parent}") is not None:
            continue  # a later source distribution may hold it
        folder = ModuleType(f"{root}.{parent}")
        folder.__path__ = []
        module = ModuleType(f"{root}.{path}")
        vars(module).update(names)
        sys.modules[folder.__name__] = folder
        sys.modules[module.__name__] = module


@contextlib.contextmanager
def _unused_modules() -> Iterator[None]:
    """Put modules of `UNUSED` that are not installed where an import finds them."""
    put = []
    for name, names in UNUSED.items():
        if importlib.util.find_spec(name) is None:
            module = ModuleType(name)
            vars(module).update(names)
            sys.modules[name] = module
            put.append(name)
    try:
        yield
    finally:
        for name in put:  # others would take it for the package
            del sys.modules[name]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        fetch(package)
