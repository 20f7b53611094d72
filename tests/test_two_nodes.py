"""Two machines, each a network namespace with an address of its own: they train, fail and go on together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.launched

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("training.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
KILLED_AT = 6


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    """Two namespaces, joined by a virtual cable and by nothing else."""
    names = [f"hd{os.getpid()}-{rank}" for rank in (0, 1)]
    commands = [f"netns add {name}" for name in names]
    commands.append("link add hd0 netns {} type veth peer name hd1 netns {}".format(*names))
    for rank, name in enumerate(names):
        commands += [f"-n {name} addr add {ADDRESSES[rank]}/24 dev hd{rank}", f"-n {name} link set hd{rank} up"]
        commands += [f"-n {name} link set lo up"]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
        yield names
    except FileNotFoundError:
        pytest.skip("there is no command `ip` (iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this user may not make network namespaces: {error.stderr.strip()}")
    finally:
        for name in names:
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def launch(machines: list[str], config: str, *arguments: object) -> list[int]:
    """Run `training.py` with one process on each machine; the exit status of each.

    The second machine may take its time, the first has a minute to notice that it ended.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | {
        "NNODES": "2", "NPROC": "1", "MASTER_ADDR": ADDRESSES[0], "CONFIG": config, "PYTHON": sys.executable,
        "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    processes = []
    try:
        for rank, name in enumerate(machines):
            command = ["ip", "netns", "exec", name, "bash", "launch/torchrun.sh", str(PROGRAM), *map(str, arguments)]
            own = environment | {"NODE_RANK": str(rank)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, start_new_session=True))
        processes[1].wait(timeout=300)
        processes[0].wait(timeout=60)
        return [process.returncode for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def losses(folder: Path) -> list[tuple[int, float, int]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["tokens"]) for line in lines]


def test_a_machine_that_fails_ends_the_other_and_both_go_on_exactly(machines: list[str], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launch(machines, "", whole) == [0, 0]
    kill = ("--signal-at", KILLED_AT, "--signal", signal.SIGKILL.value)
    failed = launch(machines, "launch/ddp.yaml", cut, *kill)
    assert all(failed), "the first machine's process lost its partner"
    assert len(losses(cut / "align")) == KILLED_AT and not (cut / "align" / "manifest.json").exists()

    assert launch(machines, "launch/ddp.yaml", cut) == [0, 0]
    assert losses(cut / "align") == losses(whole / "align"), "to the last bit"
    files = [out / "align" / "model.safetensors" for out in (cut, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
