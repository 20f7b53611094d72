"""Two machines, each a network namespace with an address of its own: they train, fail and go on together.

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


def launch(machines: list[str], config: str, *arguments: object, program: Path = PROGRAM) -> list[int]:
    """Run `training.py`, or another program, with one process on each machine; the exit status of each."""
    from processes import ON_CPU

    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | {
        "NNODES": "2", "NPROC": "1", "MASTER_ADDR": ADDRESSES[0], "CONFIG": config, "PYTHON": sys.executable,
        "PYTHONPATH": paths, **ON_CPU,
    }  # fmt: skip
    processes = []
    try:
        for rank, name in enumerate(machines):
            command = ["ip", "netns", "exec", name, "bash", "launch/torchrun.sh", str(program), *map(str, arguments)]
            own = environment | {"NODE_RANK": str(rank)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, start_new_session=True))
        return [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_machine_that_fails_ends_the_other_and_both_go_on(machines: list[str], tmp_path: Path) -> None:
    """`test_launch` has the same bits."""
    kill = ("--signal-in", "align", "--signal-at", KILLED_AT, "--number", signal.SIGKILL.value)
    failed = launch(machines, "launch/ddp.yaml", tmp_path, *kill)
    assert all(failed), "the first machine's process lost its partner"
    assert len(steps(tmp_path / "align")) == KILLED_AT and not (tmp_path / "align" / "manifest.json").exists()
    assert launch(machines, "", tmp_path) == [0, 0]
    assert steps(tmp_path / "align") == list(range(1, 13)) and (tmp_path / "align" / "manifest.json").exists()


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
    limit_collectives(5 / 60)  # what a GPU run meets after 10 minutes is met after five seconds
    on_main_process(lambda: time.sleep(8))
    (out / f"{state.process_index} is back").touch()

    def fail() -> None:
        raise ValueError("the main process is broken")

    on_main_process(fail)


if __name__ == "__main__":
    main()
