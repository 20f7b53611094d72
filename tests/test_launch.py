"""Several processes give the weights of one, and a world that was not asked for does not train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import free_port, small_config, small_models, small_rows, small_stage

from hybrid_distill.distill.loop import train_stage
from hybrid_distill.distill.stages import make_stage

pytestmark = pytest.mark.launched

PROGRAM = Path(__file__).with_name("training.py")
DDP = ("--multi_gpu", "--num_processes", "2")
ZERO_2 = ("--use_deepspeed", "--zero_stage", "2", "--num_processes", "2")


def launch(
    launcher: tuple[str, ...], *arguments: object, program: Path = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Run `training.py`, or another program, under ``accelerate launch``, on a free port."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *launcher, str(program), *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Both stages, one after the other, on one process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("alone")
    models = small_models()
    for name in ("align", "distill"):
        config = small_config(name)
        stage = make_stage(config, *models, vocab_size=99)
        train_stage(stage, small_rows(), config, out / name, progress=False)
    return out


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ddp")
    done = launch(DDP, out, "--stages", "align", "distill")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("name", ["align", "distill"])
def test_two_processes_with_ddp_give_the_weights_of_one(alone, with_ddp, name):
    assert losses(with_ddp / name) == pytest.approx(losses(alone / name), rel=1e-3)
    assert_same_weights(with_ddp / name, alone / name)


def test_a_process_killed_and_all_relaunched_gives_the_same_weights(with_ddp, tmp_path):
    killed = launch(DDP, tmp_path, "--signal-at", 6, "--signal", 9)
    assert killed.returncode != 0 and not (tmp_path / "align" / "manifest.json").exists()
    again = launch(DDP, tmp_path)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "align") == losses(with_ddp / "align"), "to the last bit"
    files = [folder / "align" / "model.safetensors" for folder in (tmp_path, with_ddp)]
    assert files[0].read_bytes() == files[1].read_bytes()


def zero_3(folder: Path) -> tuple[str, ...]:
    """A configuration that divides even the smallest parameter."""
    settings = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    }
    (folder / "zero3.json").write_text(json.dumps(settings))
    (folder / "zero3.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nmachine_rank: 0\n"
        f"num_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: {folder / 'zero3.json'}\n"
        "  zero3_init_flag: false\n"
    )
    return ("--config_file", str(folder / "zero3.yaml"))


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_gives_the_weights_of_one_process(alone, tmp_path, stage):
    """Both stages, one after the other: the second begins with what DeepSpeed gave back of the first."""
    pytest.importorskip("deepspeed")
    launcher = ZERO_2 if stage == 2 else zero_3(tmp_path)
    done = launch(launcher, tmp_path, "--stages", "align", "distill")
    assert done.returncode == 0, done.stderr
    for name in ("align", "distill"):
        assert losses(tmp_path / name) == pytest.approx(losses(alone / name), rel=1e-3)
        assert_same_weights(tmp_path / name, alone / name)


def test_a_run_moves_from_deepspeed_to_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    stopped = launch(ZERO_2, tmp_path, "--stages", "distill", "--signal-at", 6)
    assert "Interrupted: distill stopped at step 7 of 12" in stopped.stderr, stopped.stderr
    config = small_config("distill")
    shutil.copytree(tmp_path / "distill", tmp_path / "alone")
    for out in (tmp_path / "alone", tmp_path / "uninterrupted"):
        train_stage(small_stage(config), small_rows(), config, out, progress=False)
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path / "uninterrupted"), rel=1e-3)
    assert_same_weights(tmp_path / "alone", tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    "launcher", [("--cpu", "--num_processes", "2"), ("--num_processes", "2")], ids=" ".join
)
def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_refused(tmp_path, launcher):
    done = launch(launcher, tmp_path)
    assert done.returncode != 0 and "WorldError: several processes were asked for" in done.stderr
    assert not (tmp_path / "align").exists()
