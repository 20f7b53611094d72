"""Several processes give the weights of one, and a world that was not asked for does not train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ON_CPU
from safetensors.torch import load_file
from training import CHAIN, StoppingRows, free_port, small_config, small_rows, sure_models, train_chain

from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage
from hybrid_distill.train.stop import Interrupted

pytestmark = pytest.mark.launched

PROGRAM = Path(__file__).parents[1] / "training.py"
LAUNCH_FILES = Path(__file__).parents[2] / "launch"
DDP = ("--multi_gpu", "--num_processes", "2")
ZERO_2 = ("--use_deepspeed", "--zero_stage", "2", "--num_processes", "2")
FSDP_2 = ("--config_file", str(LAUNCH_FILES / "fsdp2.yaml"), "--num_processes", "2")
SHARDED = ("--teacher-sharding", "sharded")


def launch(launcher: tuple[str, ...], *arguments: object, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Run `training.py`, or another program, under ``accelerate launch``, on a free port."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port())]
    environment = {**os.environ, **ON_CPU}
    return subprocess.run(
        [*command, *launcher, str(program), *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_stage(one: Path, other: Path) -> None:
    assert len(losses(one)) == 12 and losses(one) == pytest.approx(losses(other), rel=1e-4)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages on one process, with twice the accumulation of two."""
    torch.set_num_threads(1)
    train_chain(out := tmp_path_factory.mktemp("alone"))
    return out


def zero_3(folder: Path) -> tuple[str, ...]:
    """A configuration that divides even the smallest parameter."""
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": sharded}))
    (folder / "zero3.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nmachine_rank: 0\n"
        f"num_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: {folder / 'zero3.json'}\n"
        "  zero3_init_flag: false\n"
    )
    return ("--config_file", str(folder / "zero3.yaml"))


def on_one_process(out: Path, stop_at: int) -> None:
    """Begin the distillation of `train_chain`, or go on with it."""
    stage = make_stage(small_config("distill", micro_batch_size=2), *sure_models(), vocab_size=99)
    train_stage(stage, StoppingRows(small_rows(), stop_at), out / "distill", progress=False)


def assert_each_held_half(out: Path, bf16: bool = False) -> None:
    """Each rank held half of the teacher's decoder layers, all of its embeddings and last norm, in each stage."""
    teacher = sure_models(bf16)[1]
    layers = sum(p.nbytes for p in teacher.model.layers.parameters())
    expected = sum(p.nbytes for p in teacher.parameters()) - layers // 2
    for rank in range(2):
        assert json.loads((out / f"teacher-{rank}.json").read_text()) == [expected] * len(CHAIN)


@pytest.fixture(scope="module")
def with_ddp(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(DDP, tmp_path_factory.mktemp("ddp"), *SHARDED)


def moved(launcher: tuple[str, ...], out: Path, *options: str) -> Path:
    """Train on two processes; the distillation begins, and ends, on one."""
    with pytest.raises(Interrupted, match="stopped at step 4"):
        on_one_process(out, stop_at=3)
    stopped = launch(launcher, out, "--signal-in", "distill", "--signal-at", 7, *options)
    assert "Interrupted: distill stopped at step 8 of 12" in stopped.stderr, stopped.stderr
    on_one_process(out, stop_at=-1)
    return out


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_two_processes_that_share_a_model_give_the_curves_of_one(alone: Path, tmp_path: Path, strategy: str) -> None:
    """From the start, from what the strategy gave back of the stage before, and from and to one process."""
    if strategy != "fsdp2":
        pytest.importorskip("deepspeed")
    moved({"zero2": ZERO_2, "zero3": zero_3(tmp_path), "fsdp2": FSDP_2}[strategy], tmp_path)
    for name in CHAIN:
        assert_same_stage(tmp_path / name, alone / name)


def test_two_processes_with_ddp_and_a_sharded_teacher_give_the_curves_of_one(alone: Path, with_ddp: Path) -> None:
    for name in CHAIN:
        assert_same_stage(with_ddp / name, alone / name)
    assert_each_held_half(with_ddp)


def test_a_process_killed_and_all_relaunched_gives_the_same_weights(with_ddp: Path, tmp_path: Path) -> None:
    killed = launch(DDP, tmp_path, "--signal-in", "align", "--signal-at", 6, "--number", signal.SIGKILL.value, *SHARDED)
    assert killed.returncode != 0 and not (tmp_path / "align" / "manifest.json").exists()
    again = launch(DDP, tmp_path, *SHARDED)
    assert again.returncode == 0, again.stderr
    for name in ("align", "long"):
        assert losses(tmp_path / name) == losses(with_ddp / name), "to the last bit"
        files = [folder / name / "model.safetensors" for folder in (tmp_path, with_ddp)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_fsdp2_with_a_sharded_teacher_in_bf16_with_recomputation(tmp_path: Path) -> None:
    done = launch(FSDP_2, tmp_path / "two", "--bf16", *SHARDED)
    assert done.returncode == 0, done.stderr
    train_chain(tmp_path / "one", bf16=True)
    for name in CHAIN:
        assert losses(tmp_path / "two" / name) == pytest.approx(losses(tmp_path / "one" / name), rel=5e-3)
        tensors = load_file(tmp_path / "two" / name / "model.safetensors")
        trained = {tensor for tensor in tensors if name != "align" or ".ssm." in tensor}
        assert trained == {tensor for tensor in tensors if tensors[tensor].dtype == torch.float32}
    assert_each_held_half(tmp_path / "two", bf16=True)


def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_refused(tmp_path: Path) -> None:
    done = launch(("--cpu", "--num_processes", "2"), tmp_path)
    assert done.returncode != 0 and "WorldError: several processes were asked for" in done.stderr
    assert not (tmp_path / "align").exists()


CONNECTED = """
import time
from hybrid_distill.distributed import make_accelerator

make_accelerator()
print("up", flush=True)
time.sleep(30)
print("still there")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_killed_launcher_leaves_no_process_that_trains() -> None:
    """A shell stands in for the launcher, a process that sleeps for one that trains."""
    started = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    launcher = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -c '{CONNECTED}' & wait"],
        env={**os.environ, **ON_CPU, **started, "MASTER_PORT": str(free_port())},
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == b"up\n"
    launcher.kill()
    assert launcher.stdout.read() == b"", "it lived on"
