"""Two machines, each a network namespace with an address: they train, fail and resume together.

Launched, this file is also the program in which the main process takes its time, and then fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hybrid_distill.distributed import connect, limit_collectives, on_main_process, wait_for_all

pytestmark = pytest.mark.launched

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "training.py"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
KILLED_AT = 6


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    """Two namespaces, joined by a virtual cable and by nothing else."""
    names = [f"hd{os.getpid()}-{rank}" for rank in (0, 1)]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add hd0 netns {names[0]} type veth peer name hd1 netns {names[1]}")
    for rank, name in enumerate(names):
        commands.append(f"-n {name} addr add {ADDRESSES[rank]}/24 dev hd{rank}")
        commands.append(f"-n {name} link set hd{rank} up")
        commands.append(f"-n {name} link set lo up")
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


def launch(
    machines: list[str],
    config: str,
    *arguments: object,
    program: Path = PROGRAM,
) -> list[int]:
    """Run `training.py`, or another program, with one process on each machine.

    Return the exit status of each.
    """
    from processes import ON_CPU

    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **ON_CPU}
    # The product must find the interface.
    environment.pop("GLOO_SOCKET_IFNAME", None)
    environment |= {
        "NNODES": "2",
        "NPROC": "1",
        "MASTER_ADDR": ADDRESSES[0],
        "CONFIG": config,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    processes = []
    try:
        for rank, name in enumerate(machines):
            environment["NODE_RANK"] = str(rank)
            command = ["ip", "netns", "exec", name, "bash", "launch/torchrun.sh", str(program)]
            command += map(str, arguments)
            process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
            processes.append(process)
        return [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


def test_a_machine_that_fails_ends_the_other_and_both_resume(
    machines: list[str], tmp_path: Path
) -> None:
    """`test_launch` compares the bits."""
    align = tmp_path / "align"
    kill = ("--signal-in", "align", "--signal-at", KILLED_AT, "--number", signal.SIGKILL.value)
    assert all(launch(machines, "launch/ddp.yaml", tmp_path, *kill)), "the first lost its partner"
    assert len(steps(align)) == KILLED_AT
    assert not (align / "manifest.json").exists()
    assert launch(machines, "", tmp_path) == [0, 0]
    assert steps(align) == list(range(1, 13))
    assert (align / "manifest.json").exists()


def test_the_other_machine_waits_for_a_main_process_at_work_and_not_for_one_that_failed(
    machines: list[str], tmp_path: Path
) -> None:
    assert all(launch(machines, "", tmp_path, program=Path(__file__)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 is back", "1 is back"]


def main() -> None:
    """Work on the main process for longer than a collective may take; then fail there."""
    out = Path(sys.argv[1])
    state = connect()
    wait_for_all()
    # What a GPU run meets after 10 minutes is met after three seconds.
    limit_collectives(3 / 60)
    on_main_process(lambda: time.sleep(5))
    (out / f"{state.process_index} is back").touch()

    def fail() -> None:
        raise ValueError("the main process is broken")

    on_main_process(fail)


if __name__ == "__main__":
    main()
