"""Several processes give the weights of one, and a world that was not asked for does not train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import StoppingRows, free_port, small_config, small_rows, sure_models
from transformers import PreTrainedModel

from hybrid_distill.train.checkpoint import load_stage
from hybrid_distill.train.loop import Interrupted, train_stage
from hybrid_distill.train.stages import make_stage

pytestmark = pytest.mark.launched

PROGRAM = Path(__file__).parents[1] / "training.py"
LAUNCH_FILES = Path(__file__).parents[2] / "launch"
DDP = ("--multi_gpu", "--num_processes", "2")
ZERO_2 = ("--use_deepspeed", "--zero_stage", "2", "--num_processes", "2")
FSDP_2 = ("--config_file", str(LAUNCH_FILES / "fsdp2.yaml"), "--num_processes", "2")
CURVES = ("--stages", "align", "distill", "--steps", 20, "--micro-batch-size", 2)


def launch(launcher: tuple[str, ...], *arguments: object, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
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
    """Both stages, one after the other, on one process with twice the accumulation of two."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("alone")
    models = sure_models()
    for name in ("align", "distill"):
        config = small_config(name, steps=20, micro_batch_size=2)
        stage = make_stage(config, *models, vocab_size=99)
        train_stage(stage, small_rows(), out / name, progress=False)
    return out


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory) -> Path:
    return launched(DDP, tmp_path_factory.mktemp("ddp"))


def launched(launcher: tuple[str, ...], out: Path) -> Path:
    """Both stages, one after the other: the second begins with what the strategy gave back of the first."""
    done = launch(launcher, out, *CURVES)
    assert done.returncode == 0, done.stderr
    return out


def assert_same_curves(one: Path, other: Path) -> None:
    for name in ("align", "distill"):
        assert len(losses(one / name)) == 20
        assert losses(one / name) == pytest.approx(losses(other / name), rel=1e-4)
        assert_same_weights(one / name, other / name)


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


def launcher_of(strategy: str, folder: Path) -> tuple[str, ...]:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    return {"zero2": ZERO_2, "zero3": zero_3(folder), "fsdp2": FSDP_2}[strategy]


def test_two_processes_with_ddp_give_the_curves_of_one(alone, with_ddp):
    assert_same_curves(with_ddp, alone)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_two_processes_that_share_a_model_give_the_curves_of_one(alone, tmp_path, strategy):
    assert_same_curves(launched(launcher_of(strategy, tmp_path), tmp_path), alone)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_a_run_moves_from_one_process_to_two_and_back(alone, tmp_path, strategy):
    """The losses after each move, and the weights at the end, are those of a run that stays where it is."""
    config = small_config("distill", steps=20, micro_batch_size=2)
    load_stage(alone / "align", (models := sure_models())[0])
    out = tmp_path / "distill"
    (tmp_path / "align").symlink_to(alone / "align")

    def on_one_process(stop_at: int) -> None:
        stage = make_stage(config, *models, vocab_size=99)
        train_stage(stage, StoppingRows(small_rows(), stop_at), out, progress=False)

    with pytest.raises(Interrupted, match="stopped at step 7"):
        on_one_process(stop_at=6)
    stopped = launch(launcher_of(strategy, tmp_path), tmp_path, *CURVES, "--signal-at", 12)
    assert "Interrupted: distill stopped at step 13 of 20" in stopped.stderr, stopped.stderr
    load_stage(alone / "align", models[0])
    on_one_process(stop_at=-1)
    assert losses(out) == pytest.approx(losses(alone / "distill"), rel=1e-4)
    assert_same_weights(out, alone / "distill")


def assert_each_held_half(out: Path, teacher: PreTrainedModel) -> None:
    """Each rank held half of the teacher's decoder layers, all of its embeddings and last norm, in each stage."""
    layers = sum(p.nbytes for p in teacher.model.layers.parameters())
    expected = sum(p.nbytes for p in teacher.parameters()) - layers // 2
    for rank in range(2):
        assert json.loads((out / f"teacher-{rank}.json").read_text()) == [expected, expected]


def test_a_sharded_teacher_gives_the_curves_of_a_replicated_one(alone, tmp_path):
    done = launch(DDP, tmp_path, *CURVES, "--teacher-sharding", "sharded")
    assert done.returncode == 0, done.stderr
    assert_same_curves(tmp_path, alone)
    assert_each_held_half(tmp_path, sure_models()[1])


def test_fsdp2_with_a_sharded_teacher_in_bf16_with_recomputation(tmp_path):
    options = "--steps", 8, "--micro-batch-size", 2, "--precision", "bf16", "--gradient-checkpointing"
    both = ("--stages", "align", "distill", "--teacher-sharding", "sharded")
    done = launch(FSDP_2, tmp_path / "two", *both, *options)
    assert done.returncode == 0, done.stderr
    student, teacher = sure_models("bf16")
    for name in ("align", "distill"):
        config = small_config(name, steps=8, micro_batch_size=2, precision="bf16", gradient_checkpointing=True)
        stage = make_stage(config, student, teacher, vocab_size=99)
        train_stage(stage, small_rows(), tmp_path / name, progress=False)
        assert losses(tmp_path / "two" / name) == pytest.approx(losses(tmp_path / name), rel=2e-3)
        tensors = load_file(tmp_path / "two" / name / "model.safetensors")
        trained = {tensor for tensor in tensors if name == "distill" or ".ssm." in tensor}
        assert trained == {tensor for tensor in tensors if tensors[tensor].dtype == torch.float32}
    assert_each_held_half(tmp_path / "two", teacher)


def test_a_process_killed_and_all_relaunched_gives_the_same_weights(with_ddp, tmp_path):
    killed = launch(DDP, tmp_path, *CURVES, "--signal-at", 6, "--signal", 9)
    assert killed.returncode != 0 and not (tmp_path / "align" / "manifest.json").exists()
    again = launch(DDP, tmp_path, *CURVES)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "align") == losses(with_ddp / "align"), "to the last bit"
    files = [folder / "align" / "model.safetensors" for folder in (tmp_path, with_ddp)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("launcher", [("--cpu", "--num_processes", "2"), ("--num_processes", "2")], ids=" ".join)
def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_refused(tmp_path, launcher):
    done = launch(launcher, tmp_path)
    assert done.returncode != 0 and "WorldError: several processes were asked for" in done.stderr
    assert not (tmp_path / "align").exists()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_segments_are_computed_again_with_sharded_weights(tmp_path, strategy):
    config = small_config("long", steps=4, micro_batch_size=2)
    torch.set_num_threads(1)
    stage = make_stage(config, *sure_models(), vocab_size=99)
    train_stage(stage, small_rows(), tmp_path / "alone", progress=False)
    launcher = launcher_of(strategy, tmp_path)
    done = launch(launcher, tmp_path, "--stages", "long", "--steps", 4, "--micro-batch-size", 2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "long") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert_same_weights(tmp_path / "long", tmp_path / "alone")


CONNECTED = """
import time
from hybrid_distill.distributed import make_accelerator

make_accelerator()
print("up", flush=True)
time.sleep(30)
print("still there")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_killed_launcher_leaves_no_process_that_trains():
    """A shell stands in for the launcher, a process that sleeps for one that trains."""
    started = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    launcher = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -c '{CONNECTED}' & wait"],
        env={**os.environ, **started, "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert launcher.stdout is not None and launcher.stdout.readline() == b"up\n"
    launcher.kill()
    assert launcher.stdout.read() == b"", "it lived on"
