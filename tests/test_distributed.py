"""A launch trains on the processes asked for, or not at all; trackers are asked for by name."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from hybrid_distill.distributed import (
    WorldError,
    _name_gloo_interface,
    check_trackers,
    make_accelerator,
    warn_of_emulation,
)


def test_a_tracker_is_asked_for_by_name(monkeypatch):
    with pytest.raises(ValueError, match=r"'mlflow'.*trackio"):
        check_trackers(["mlflow"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_trackers(["wandb"])


def test_without_a_key_wandb_is_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    check_trackers(["wandb"])
    assert os.environ.pop("WANDB_MODE") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "key")
    check_trackers(["wandb"])
    assert "WANDB_MODE" not in os.environ


@pytest.mark.parametrize("is_native", [True, False])
def test_bfloat16_on_a_cpu_without_it_is_warned_of(monkeypatch, caplog, is_native):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    warn_of_emulation(torch.device("cuda"), "--dtype float32")
    assert not caplog.text
    warn_of_emulation(torch.device("cpu"), "--dtype float32")
    assert ("pass --dtype float32" in caplog.text) is not is_native


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
            "accelerate started one",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true"},
            "FSDP version 1 is not supported; .* launch/fsdp2.yaml",
        ),
        (
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
            },
            "or add --fsdp_cpu_ram_efficient_loading false",
        ),
        (
            {
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "-1",
                "RANK": "0",
                "ACCELERATE_USE_CPU": "true",
            },
            None,
        ),
    ],
)
def test_a_world_that_was_not_asked_for_is_refused(monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if message is None:
        monkeypatch.setattr("accelerate.Accelerator", one_process)
        message = "the launcher announced 2 processes and 1 run together"
    with pytest.raises(WorldError, match=message):
        make_accelerator()


def one_process(**kwargs):
    """One process alone, as accelerate starts for a launch that it does not understand."""
    return SimpleNamespace(num_processes=1)


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
def test_gloo_is_told_the_interface_on_several_machines(monkeypatch, changes, expected):
    for name, value in {**SEVERAL_MACHINES, **changes}.items():
        monkeypatch.setenv(name, value)
    _name_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected
