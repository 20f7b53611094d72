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
    ours = {
        str(Path(name) / path.relative_to(home))
        for name, home in homes.items()
        for path in home.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    [info] = wheel.glob("*.dist-info")
    found = {
        str(path.relative_to(wheel))
        for path in wheel.rglob("*")
        if path.is_file() and info not in path.parents
    }
    assert found == ours and "hybrid_distill/assets/tiny_teacher/model.safetensors" in found
    assert (
        "hybrid-distill = hybrid_distill.__main__:main"
        in (info / "entry_points.txt").read_text()
    )


@pytest.mark.launched
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "run recipes/hybrid_tiny.py --dry-run --align.steps 1 --distill.steps 1",
            "hybrid-distill run recipes/hybrid_tiny.py",
        ),
        (
            "sweep recipes/sweep_llama_1b.py --set teacher=tiny --dry-run",
            "sweep-llama-1b: 31 cells",
        ),
        ("sweep sweep_tiny --dry-run", "sweep-tiny: "),
    ],
)
def test_without_a_clone_a_recipe_runs_as_the_docs_call_it(
    command: str, shown: str, wheel: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel), *sys.path[1:]])}
    words = command.split()
    code = "import hybrid_distill.cli as cli; print(cli.__file__); cli.main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(wheel)) and shown in ran.stdout


def test_the_program_of_this_environment_runs_outside_the_clone(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "hybrid-distill"
    if not program.is_file():
        pytest.skip("not installed in this environment; pip install -e .")
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    ran = subprocess.run(
        [program, "recipes"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0 and "tiny" in ran.stdout, ran.stderr
