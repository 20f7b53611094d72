"""A launch for GPUs refuses the CPU, and a run's first line says what it computes on.

This file is also the program that each of two processes runs: ``test_devices.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

if __name__ == "__main__":
    ROOT = Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import torch
from messages import naming

from hybrid_distill.distributed import WorldError, connect, device_check, devices
from hybrid_distill.distributed.device_check import (
    check_devices,
    note_on_launch,
    problem_of_launch,
)
from hybrid_distill.distributed.devices import DeviceFacts, driver_version
from hybrid_distill.distributed.launch import CPU_REQUESTED

LAUNCH_FILES = Path(__file__).parents[2] / "launch"
GPU = DeviceFacts("node-a", "cuda", "NVIDIA H100", "2.13.0", "13.0", "580.65", "")
CPU = replace(GPU, host="node-d", kind="cpu", name="x86_64", cuda="", driver="")
BROKEN = replace(CPU, problem="the driver is too old")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU, a torch for CUDA, and a driver that is too old."""
    for name in (
        CPU_REQUESTED,
        "CUDA_VISIBLE_DEVICES",
        "LOCAL_RANK",
        "ACCELERATE_MIXED_PRECISION",
    ):
        monkeypatch.delenv(name, raising=False)

    def refuse() -> None:
        raise RuntimeError(f"{TOO_OLD}\nUpdate it.")

    version = tmp_path / "version"
    version.write_text("470.256.02\n")
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "NVIDIA_SIGNS", (str(tmp_path / "nvidia[0-9]*"), str(version)))
    monkeypatch.setattr(devices, "NVIDIA_DRIVER", (str(version),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_check, "_facts", None)
    return tmp_path


def test_a_gpu_that_torch_cannot_use_is_refused(machine):
    with pytest.raises(WorldError, match=naming("11040")):
        check_devices()
    assert driver_version() == "470.256.02"


def test_a_container_without_its_gpus_has_the_driver_alone(machine):
    (machine / "nvidia0").unlink()
    with pytest.raises(WorldError, match=naming(machine / "version")):
        check_devices()


@pytest.mark.parametrize(
    ("name", "value"),
    [(CPU_REQUESTED, "true"), ("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")],
)
def test_whoever_asks_for_the_cpu_gets_it(machine, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert DeviceFacts.find().problem == ""
    check_devices()


def test_a_machine_without_a_gpu_computes_on_its_cpu(machine):
    (machine / "nvidia0").unlink()
    (machine / "version").unlink()
    facts = DeviceFacts.find()
    assert (facts.kind, facts.problem, facts.driver) == ("cpu", "", "")


def test_a_torch_without_cuda_is_somebodys_choice(machine, monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", None)
    check_devices()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(machine / "nvidia0") in caplog.text


@pytest.mark.parametrize("launched", ["LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"])
@pytest.mark.parametrize("built_for", ["13.0", None])
def test_a_launched_process_never_falls_back_to_the_cpu(machine, monkeypatch, launched, built_for):
    """Not even where there is nothing to see of a GPU: someone has launched it for one."""
    monkeypatch.setattr(torch.version, "cuda", built_for)
    for sign in ("nvidia0", "version"):
        (machine / sign).unlink()
    monkeypatch.setenv(launched, "0")
    with pytest.raises(WorldError, match=CPU_REQUESTED):
        check_devices()
    monkeypatch.setenv(CPU_REQUESTED, "true")
    check_devices()


def test_a_process_without_a_gpu_of_its_own_is_refused(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "2 GPUs" in DeviceFacts.find().problem


def test_processes_on_one_kind_of_device_may_compute():
    assert problem_of_launch([GPU] * 4) == problem_of_launch([CPU] * 2) == ""
    assert note_on_launch([GPU] * 4) == ""


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ([GPU, GPU, GPU, BROKEN], ("process 3", "node-d", BROKEN.problem)),
        ([GPU, CPU], ("node-a", "node-d")),
    ],
    ids=["one bad node of four", "a GPU and a CPU"],
)
def test_what_must_not_compute_is_named(facts, named):
    problem = problem_of_launch(facts)
    for part in named:
        assert part in problem


def test_another_gpu_or_version_is_noted():
    note = note_on_launch([GPU, replace(GPU, name="NVIDIA A100", torch="2.12.0")])
    assert "NVIDIA A100" in note
    assert "2.12.0" in note


@pytest.mark.launched
def test_processes_compare_their_devices_before_they_connect():
    """A group of NCCL here and gloo there would never come to be."""
    from processes import start_two

    ended = start_two(Path(__file__), own=[{"DEVICE": "gpu"}, {"DEVICE": "cpu"}])
    assert [process.status for process in ended] == [2, 2], ended
    n_errors = [process.err.count("error: ") for process in ended]
    assert n_errors == [1, 0], "once, by the main process"
    assert "process 1" in ended[0].err


def launch(file: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Launch `main` by a launch file; without ``ACCELERATE_USE_CPU``, unless the file sets it."""
    from training import free_port

    environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    environment.pop(CPU_REQUESTED, None)
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(LAUNCH_FILES / file)]
    command += ["--main_process_port", str(free_port())]
    if file != "cpu.yaml":
        command += ["--num_processes", "1" if file == "single_gpu.yaml" else "2"]
    return subprocess.run(
        [*command, __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.launched
@pytest.mark.parametrize("file", ["single_gpu.yaml", "ddp.yaml", "fsdp2.yaml"])
def test_a_launch_file_for_gpus_refuses_the_cpu(file):
    ended = launch(file, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode != 0, ended.stderr
    assert ended.stderr.count("error: ") == 1, ended.stderr
    assert "connected" not in ended.stdout


@pytest.mark.launched
def test_the_launch_file_for_the_cpu_computes_there():
    ended = launch("cpu.yaml")
    assert ended.returncode == 0, ended.stderr
    assert "connected cpu" in ended.stdout, ended.stderr


def test_the_first_line_of_a_run_says_what_computes(tmp_path, caplog):
    from training import small_run

    from hybrid_distill.pipeline import RunInputs
    from hybrid_distill.pipeline import run as steps

    steps.announce.cache_clear()
    caplog.set_level("INFO", logger="hybrid_distill")
    config = small_run(tmp_path / "run")
    for _ in range(2):
        steps.prepare(RunInputs(config))
    messages = [record.getMessage() for record in caplog.records]
    for part in ("cpu", "kernels of torch", torch.__version__, "CUDA", "driver"):
        assert part in messages[0]
    assert messages.count(messages[0]) == 1, "however many runs there are within one"


def main() -> None:
    """Connect as a process of a launch, on a device of its own."""
    from hybrid_distill.cli.app import exit_cleanly

    device = os.environ.get("DEVICE")
    if device:
        facts = {"gpu": GPU, "cpu": CPU}[device]
        DeviceFacts.find = classmethod(lambda cls: facts)  # type: ignore[method-assign,assignment]
    exit_cleanly(lambda: print("connected", connect().device.type))


if __name__ == "__main__":
    main()
