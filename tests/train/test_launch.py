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
from messages import has_facts, naming
from processes import ON_CPU
from safetensors.torch import load_file
from torch.testing import assert_close
from training import (
    CHAIN,
    StoppingRows,
    free_port,
    losses,
    small_config,
    small_rows,
    sure_models,
    train_chain,
)

from hybrid_distill.distributed import WorldError
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


def launch(
    launcher: tuple[str, ...],
    *arguments: object,
    program: Path = PROGRAM,
) -> subprocess.CompletedProcess[str]:
    """Run `training.py`, or another program, under ``accelerate launch``, on a free port."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--main_process_port", str(free_port())]
    command += launcher
    command.append(str(program))
    command += map(str, arguments)
    return subprocess.run(
        command,
        env={**os.environ, **ON_CPU},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def assert_same_stage(one: Path, other: Path) -> None:
    """Compare losses and weights: sums of two processes are rounded in another order."""
    assert len(losses(one)) == 12
    assert losses(one) == pytest.approx(losses(other), rel=1e-4)
    tensors = load_file(one / "model.safetensors")
    expected = load_file(other / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages on one process, with twice the accumulation of two."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("alone")
    train_chain(out)
    return out


ZERO_3_LAUNCH = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
machine_rank: 0
num_processes: 2
deepspeed_config:
  deepspeed_config_file: {settings}
  zero3_init_flag: false
"""


def zero_3(folder: Path) -> tuple[str, ...]:
    """Write a launch file that divides even the smallest parameter."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    settings = folder / "zero3.json"
    settings.write_text(json.dumps({"zero_optimization": zero}))
    launch_file = folder / "zero3.yaml"
    launch_file.write_text(ZERO_3_LAUNCH.format(settings=settings))
    return ("--config_file", str(launch_file))


def on_one_process(out: Path, stop_at: int | None = None) -> None:
    """Begin the distillation of `train_chain`, or continue it."""
    config = small_config("distill", micro_batch_size=2)
    stage = make_stage(config, *sure_models(), vocab_size=99)
    train_stage(stage, StoppingRows(small_rows(), stop_at), out / "distill", progress=False)


def moved(launcher: tuple[str, ...], out: Path, *options: str) -> Path:
    """Train on two processes; the distillation begins, and ends, on one."""
    with pytest.raises(Interrupted, match=naming("distill", "step 4")):
        on_one_process(out, stop_at=3)
    stopped = launch(launcher, out, "--signal-in", "distill", "--signal-at", 7, *options)
    assert has_facts(stopped.stderr, "distill", "step 8"), stopped.stderr
    on_one_process(out)
    return out


def assert_each_held_half(out: Path, bf16: bool = False) -> None:
    """Check that each rank held half of the teacher's layers, in each stage.

    Embeddings and the last norm are whole in both.
    """
    _, teacher = sure_models(bf16)
    whole = sum(parameter.nbytes for parameter in teacher.parameters())
    layers = sum(parameter.nbytes for parameter in teacher.model.layers.parameters())
    expected = whole - layers // 2
    for rank in range(2):
        held_bytes = json.loads((out / f"teacher-{rank}.json").read_text())
        assert held_bytes == [expected] * len(CHAIN)


@pytest.fixture(scope="module")
def with_ddp(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(DDP, tmp_path_factory.mktemp("ddp"), *SHARDED)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_two_processes_that_share_a_model_give_the_curves_of_one(
    alone: Path, tmp_path: Path, strategy: str
) -> None:
    """From the start, from what the strategy gave back before, and from and to one process."""
    if strategy != "fsdp2":
        pytest.importorskip("deepspeed")
    launchers = {
        "zero2": ZERO_2,
        "zero3": zero_3(tmp_path),
        "fsdp2": FSDP_2,
    }
    moved(launchers[strategy], tmp_path)
    for name in CHAIN:
        assert_same_stage(tmp_path / name, alone / name)


def test_two_processes_with_ddp_and_a_sharded_teacher_give_the_curves_of_one(
    alone: Path, with_ddp: Path
) -> None:
    for name in CHAIN:
        assert_same_stage(with_ddp / name, alone / name)
    assert_each_held_half(with_ddp)


def test_a_sharded_teacher_judges_text_that_only_some_processes_have(tmp_path: Path) -> None:
    """In most steps one process has given and written rows, and the other has rows of one kind."""
    names = ("on_policy",)
    ended = launch(DDP, tmp_path / "two", "--names", *names, *SHARDED)
    assert ended.returncode == 0, ended.stderr
    train_chain(tmp_path / "one", names=names)
    assert_same_stage(tmp_path / "two" / "on_policy", tmp_path / "one" / "on_policy")


@pytest.mark.parametrize("launcher", [DDP, FSDP_2], ids=["ddp", "fsdp2"])
def test_compiled_layers_give_the_curves_of_one_process_that_compiles_nothing(
    alone: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """FSDP2's layers are sharded, so that none is compiled."""
    ended = launch(launcher, tmp_path, "--compiled")
    assert ended.returncode == 0, ended.stderr
    for name in CHAIN:
        assert_same_stage(tmp_path / name, alone / name)


def test_a_process_killed_and_all_relaunched_gives_the_same_weights(
    with_ddp: Path, tmp_path: Path
) -> None:
    kill = ("--signal-in", "align", "--signal-at", 6, "--number", signal.SIGKILL.value)
    killed = launch(DDP, tmp_path, *kill, *SHARDED)
    assert killed.returncode != 0
    assert not (tmp_path / "align" / "manifest.json").exists()

    relaunched = launch(DDP, tmp_path, *SHARDED)
    assert relaunched.returncode == 0, relaunched.stderr

    # `with_ddp` begins its last stage on one process, which rounds otherwise.
    for name in ("align", "long"):
        assert losses(tmp_path / name) == losses(with_ddp / name), "to the last bit"
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        expected = (with_ddp / name / "model.safetensors").read_bytes()
        assert weights == expected


@pytest.mark.parametrize("launcher", [DDP, FSDP_2], ids=["ddp", "fsdp2"])
def test_two_processes_in_bf16_with_a_sharded_teacher_and_recomputation(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """DDP reads bfloat16 copies of the weights, and adds their gradients before it exchanges them."""
    two = tmp_path / "two"
    one = tmp_path / "one"

    ended = launch(launcher, two, "--bf16", *SHARDED)
    train_chain(one, bf16=True)

    assert ended.returncode == 0, ended.stderr
    for name in CHAIN:
        assert losses(two / name) == pytest.approx(losses(one / name), rel=5e-3)
        tensors = load_file(two / name / "model.safetensors")
        in_float32 = {key for key, tensor in tensors.items() if tensor.dtype == torch.float32}
        # Alignment trains the recurrent heads alone, the other stages all weights.
        trained = {key for key in tensors if name != "align" or ".ssm." in key}
        assert in_float32 == trained
    assert_each_held_half(two, bf16=True)


def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_refused(tmp_path: Path) -> None:
    ended = launch(("--cpu", "--num_processes", "2"), tmp_path)
    assert ended.returncode != 0
    assert WorldError.__name__ in ended.stderr
    assert not (tmp_path / "align").exists()
