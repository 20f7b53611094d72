"""A launch runs on the processes that were asked for, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from messages import naming
from processes import ON_CPU
from training import free_port

from hybrid_distill.distributed import (
    WorldError,
    make_accelerator,
    multiplies_bf16,
    warn_of_emulation,
)
from hybrid_distill.distributed.connection import _name_gloo_interface

FSDP_2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize("is_native", [True, False])
def test_bfloat16_on_a_cpu_without_it_is_warned_of(set_cpu_bf16, caplog, is_native):
    set_cpu_bf16(is_native)
    warn_of_emulation(torch.device("cuda"), "--dtype float32")
    assert not caplog.text
    warn_of_emulation(torch.device("cpu"), "--dtype float32")
    assert ("--dtype float32" in caplog.text) is not is_native


@pytest.mark.parametrize("is_native", [True, False])
def test_a_gpu_decides_what_auto_stands_for_where_there_is_one(
    monkeypatch, set_cpu_bf16, is_native
) -> None:
    """GPUs before Ampere emulate bfloat16, which torch counts as support unless told otherwise."""
    set_cpu_bf16(not is_native)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or is_native,
    )
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert multiplies_bf16() is is_native
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert multiplies_bf16() is not is_native


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "--multi_gpu"),
        ({"ACCELERATE_USE_FSDP": "true"}, "launch/fsdp2.yaml"),
        (
            {**FSDP_2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "--fsdp_cpu_ram_efficient_loading false",
        ),
    ],
)
def test_a_launch_that_would_train_something_else_is_refused(monkeypatch, environment, named):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=named):
        make_accelerator()


def test_fewer_processes_than_announced_are_refused(monkeypatch):
    environment = {"WORLD_SIZE": "2", "LOCAL_RANK": "-1", "RANK": "0", "ACCELERATE_USE_CPU": "true"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # One process alone, as accelerate starts for a launch that it does not understand.
    alone = SimpleNamespace(num_processes=1)
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: alone)
    with pytest.raises(WorldError, match=naming(2, 1)):
        make_accelerator()


SEVERAL_MACHINES = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "GLOO_SOCKET_IFNAME": "",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "lo"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, ""),
        ({"WORLD_SIZE": "1"}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
    ids=["leads to machine 0", "unknown machine", "one machine", "named already"],
)
def test_gloo_gets_the_interface_that_reaches_machine_0(monkeypatch, changes, expected):
    for name, value in {**SEVERAL_MACHINES, **changes}.items():
        monkeypatch.setenv(name, value)
    _name_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected


CONNECTED = """
import time
from hybrid_distill.distributed import make_accelerator

make_accelerator()
print("up", flush=True)
time.sleep(30)
print("still there")
"""


@pytest.mark.launched
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl of Linux")
def test_a_killed_launcher_leaves_no_process_that_trains():
    """A shell stands in for the launcher, a process that sleeps for one that trains."""
    environment = {**os.environ, **ON_CPU, "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launcher = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -c '{CONNECTED}' & wait"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    launcher.kill()
    assert launcher.stdout.read() == b"", "it lived on"
