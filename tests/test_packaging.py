"""The wheel: everything that a command needs is in it, and it runs where there is no clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the wheel, as pip lays them into site-packages."""
    pytest.importorskip("hatchling", reason="builds wheels; pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [path] = folder.glob("*.whl")
    zipfile.ZipFile(path).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    homes = {
        "hybrid_distill": ROOT / "hybrid_distill",
        "hybrid_kernels": ROOT / "kernels/hybrid_kernels",
        "hybrid_distill_recipes": ROOT / "recipes",
    }
    expected = set()
    for name, home in homes.items():
        for path in home.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                expected.add(str(Path(name) / path.relative_to(home)))
    [info] = wheel.glob("*.dist-info")
    packed = set()
    for path in wheel.rglob("*"):
        if path.is_file() and info not in path.parents:
            packed.add(str(path.relative_to(wheel)))
    assert packed == expected
    assert "hybrid_distill/assets/tiny_teacher/model.safetensors" in packed
    assert (
        "hybrid-distill = hybrid_distill.__main__:main" in (info / "entry_points.txt").read_text()
    )


# One process for all: importing torch takes longer than the commands.
THREE_COMMANDS = """
import hybrid_distill.cli as cli

print(cli.__file__)
small = "--dry-run --align.steps 1 --distill.steps 1"
cli.main(f"run recipes/hybrid_tiny.py {small}".split())
cli.main("sweep recipes/sweep_llama_1b.py --set teacher=tiny --dry-run".split())
cli.main("sweep sweep_tiny --dry-run".split())
"""


@pytest.mark.launched
def test_without_a_clone_recipes_run_as_the_docs_call_them(wheel: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel), *sys.path[1:]])}
    ran = subprocess.run(
        [sys.executable, "-c", THREE_COMMANDS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(wheel))
    for result in (
        "hybrid-distill run recipes/hybrid_tiny.py",
        "sweep-llama-1b: 31 cells",
        "sweep-tiny: ",
    ):
        assert result in ran.stdout


def test_the_program_of_this_environment_runs_outside_the_clone(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "hybrid-distill"
    if not program.is_file():
        pytest.skip("not installed in this environment; pip install -e .")
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        [program, "recipes"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "tiny" in ran.stdout
