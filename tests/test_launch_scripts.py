"""launch/torchrun.sh and launch/slurm.sbatch: what they start, refuse, and do when time is up.

SLURM's commands are stand-ins for what its manual describes; no cluster ran this.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from messages import has_facts
from training import free_port

ROOT = Path(__file__).parents[1]
TRAIN = """
    recipes/hybrid_tiny.py --plan.selection random --stages align
    --align.batch-size 2 --align.log-every 1
    --data.seq-len 64 --student.d-state 4 --scoring.n-control-texts 2 --no-export
    --evaluation.n-pairs 8 --evaluation.n-examples 2 --evaluation.n-texts 2
""".split()
ALIGNED = Path("stages", "1-align")

STAND_INS = {
    # One task for each machine, here; a signal to srun is one to each task.
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
            SLURM_NODEID=$node "$@" & tasks+=($!)
        done
        trap 'kill -USR1 "${tasks[@]}"' USR1
        while kill -0 "${tasks[@]}" 2> /dev/null; do wait "${tasks[@]}"; done
        for task in "${tasks[@]}"; do wait "$task" || status=$?; done
        exit "${status:-0}"
    """,
    "scontrol": """
        echo "$*" >> "$RECORD/scontrol"
        if [[ $1 == show ]]; then printf 'node-%s\\n' a b; fi
    """,
    # An interpreter that only records what it was to run; the process below it would train.
    # Asked with -c, it counts GPUs.
    "recorder": f"""
        if [[ $1 == -c ]]; then echo "$GPUS the driver is too old"; exit; fi
        echo "$*" >> "$RECORD/commands"
        {sys.executable} -S "$RECORD/worker.py" &
        wait $!
    """,
}
WORKER = """  # in Python: bash cannot trap a signal that was ignored when it began
import os, pathlib, signal, sys, time

def stop(number, frame):
    if os.environ["ON_STOP"] == "finish":
        pathlib.Path(os.environ["HYBRID_DISTILL_FINISHED"]).touch()
    if os.environ["ON_STOP"] != "go on":
        sys.exit(0)

signal.signal(signal.SIGUSR1, stop)
pathlib.Path(os.environ["RECORD"], f"{os.getpid()}.trains").touch()
time.sleep(float(os.environ["SECONDS_OF_WORK"]))
sys.exit(int(os.environ["STATUS"]))
"""


JOB = str(4711 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))
"""Number of a job: `slurm.sbatch` writes a file of this name into the folder that workers share."""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Environment of a job on two machines, with stand-ins for SLURM's commands and Python."""
    commands = tmp_path / "bin"
    record = tmp_path / "record"
    commands.mkdir()
    record.mkdir()
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (commands / name).chmod(0o755)
    (record / "worker.py").write_text(WORKER)
    environment = dict(os.environ)
    for name in ("NNODES", "NODE_RANK", "NPROC", "MASTER_ADDR", "MASTER_PORT", "CONFIG"):
        environment.pop(name, None)
    environment.pop("ACCELERATE_USE_CPU", None)
    return environment | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "RECORD": str(record),
        "PYTHON": "recorder",
        "GPUS": "4",
        "SECONDS_OF_WORK": "0",
        "STATUS": "0",
        "ON_STOP": "save",
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_GPUS_ON_NODE": "4",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    while STARTED:
        with suppress(ProcessLookupError):
            os.killpg(STARTED.pop().pid, signal.SIGKILL)


def run(
    script: str,
    environment: dict[str, str],
    *arguments: str,
    stop: tuple[int, Callable[[], bool]] | None = None,
) -> tuple[int, str]:
    """Return the exit status and all output; ``stop`` is a signal, sent once a condition holds."""
    process = subprocess.Popen(
        ["bash", f"launch/{script}", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    STARTED.append(process)
    if stop:
        end = time.monotonic() + 480
        while not stop[1]() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(stop[0])
    output, _ = process.communicate(timeout=480)
    return process.returncode, output


def recorded(environment: dict[str, str], name: str) -> list[str]:
    path = Path(environment["RECORD"]) / name
    if not path.exists():
        return []
    return path.read_text().splitlines()


def trains(environment: dict[str, str], n: int) -> Callable[[], bool]:
    return lambda: len(list(Path(environment["RECORD"]).glob("*.trains"))) == n


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_bash_reads_a_script(name: str) -> None:
    assert os.access(ROOT / "launch" / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / "launch" / name], check=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    if shellcheck:
        subprocess.run([shellcheck, ROOT / "launch" / name], check=True)


@pytest.mark.parametrize(
    ("script", "changes", "named"),
    [
        ("torchrun.sh", {"NNODES": "two"}, "NNODES 'two'"),
        ("torchrun.sh", {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        (
            "torchrun.sh",
            {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"},
            "NODE_RANK '2'",
        ),
        ("torchrun.sh", {"CONFIG": "launch/zero9.yaml"}, "CONFIG 'launch/zero9.yaml'"),
        ("torchrun.sh", {"PYTHON": "no-such-python"}, "'no-such-python'"),
        ("torchrun.sh", {"GPUS": "0"}, "the driver is too old"),
        (
            "torchrun.sh",
            {"GPUS": "0", "NPROC": "2", "CONFIG": "launch/fsdp2.yaml"},
            "the driver is too old",
        ),
        (
            "torchrun.sh",
            {"GPUS": "0", "ACCELERATE_USE_CPU": "false"},
            "ACCELERATE_USE_CPU=true",
        ),
        ("torchrun.sh", {"GPUS": "2", "NPROC": "3"}, "'3'"),
        ("slurm.sbatch", {"SLURM_GPUS_ON_NODE": ""}, "--gpus-per-node"),
        ("slurm.sbatch", {"GPUS": "0"}, "the driver is too old"),
    ],
)
def test_what_cannot_run_is_named_in_a_line_and_starts_nothing(
    machine: dict[str, str], script, changes, named
) -> None:
    status, output = run(script, machine | changes, "recipe.py")
    assert status == 2
    assert has_facts(output, *named.split()), output
    if script == "torchrun.sh":
        assert len(output.splitlines()) == 1
    assert not recorded(machine, "commands")


def test_a_job_that_would_begin_again_at_every_requeue_is_refused(
    machine: dict[str, str],
) -> None:
    status, output = run("slurm.sbatch", machine, "recipe.py", "--resume", "never")
    assert status == 2
    assert "--resume never" in output
    assert not recorded(machine, "commands")


@pytest.mark.parametrize(
    ("changes", "processes"),
    [
        ({"ACCELERATE_USE_CPU": "true"}, 1),
        ({"ACCELERATE_USE_CPU": "True", "NPROC": "2"}, 2),
        ({"CONFIG": "launch/cpu.yaml"}, 1),
        ({"GPUS": "4"}, 4),
    ],
)
def test_a_machine_starts_a_process_for_each_gpu_or_on_the_cpu_that_was_asked_for(
    machine: dict[str, str], changes, processes
) -> None:
    status, output = run("torchrun.sh", machine | {"GPUS": "0"} | changes, "recipe.py")
    assert status == 0, output
    [command] = recorded(machine, "commands")
    flag = "--num_processes" if "CONFIG" in changes else "--nproc_per_node"
    assert f"{flag} {processes} " in command


@pytest.mark.parametrize("config", ["launch/zero2.yaml", ""])
def test_a_job_starts_one_launcher_on_each_machine(machine: dict[str, str], config: str) -> None:
    status, output = run(
        "slurm.sbatch",
        {**machine, "CONFIG": config},
        "recipe.py",
        "--out",
        "runs/a b",
        "--flag=*",
    )
    assert status == 0, output
    common = (
        "-m torch.distributed.run --nnodes 2 --node_rank {} --nproc_per_node 4 "
        "--master_addr node-a "
        f"--master_port 2{JOB}"
    )
    if config:
        common = (
            f"-m accelerate.commands.launch --config_file {config} "
            "--num_processes 8 --num_machines 2 "
            f"--machine_rank {{}} --main_process_port 2{JOB} --main_process_ip node-a"
        )
    expected = [common.format(rank) + " recipe.py --out runs/a b --flag=*" for rank in (0, 1)]
    assert sorted(recorded(machine, "commands")) == expected
    assert recorded(machine, "scontrol") == ["show hostnames node-[a-b]"], "nothing was requeued"


def test_a_job_that_fails_is_not_requeued(machine: dict[str, str]) -> None:
    status, _ = run("slurm.sbatch", {**machine, "STATUS": "2"}, "recipe.py")
    assert status == 2
    assert f"requeue {JOB}" not in recorded(machine, "scontrol")


@pytest.mark.parametrize(
    ("on_stop", "seconds", "requeued"),
    [("save", 60, True), ("finish", 60, False), ("go on", 3, True)],
)
def test_a_job_whose_time_is_up_is_requeued_unless_it_is_finished(
    machine: dict[str, str], on_stop: str, seconds: int, requeued: bool
) -> None:
    environment = {**machine, "SECONDS_OF_WORK": str(seconds), "ON_STOP": on_stop}
    if on_stop == "go on":
        environment["GRACE"] = "1"
    stop = (signal.SIGUSR1, trains(machine, 2))
    status, output = run("slurm.sbatch", environment, "recipe.py", stop=stop)
    assert status == 0, output
    assert (f"requeue {JOB}" in recorded(machine, "scontrol")) == requeued
    assert not list(ROOT.glob(f".slurm-{JOB}-*"))


def test_a_machine_that_is_told_to_stop_ends_with_status_0(machine: dict[str, str]) -> None:
    environment = {**machine, "NPROC": "1", "SECONDS_OF_WORK": "60"}
    stop = (signal.SIGTERM, trains(machine, 1))
    status, output = run("torchrun.sh", environment, "recipe.py", stop=stop)
    assert status == 0, output


@pytest.mark.launched
def test_a_launch_under_nohup_outlives_a_hangup(machine: dict[str, str], tmp_path: Path) -> None:
    """With torchrun itself, which would end."""
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(5)\n"
    )
    begun = tmp_path / "begun"
    process = subprocess.Popen(
        ["nohup", "bash", "launch/torchrun.sh", str(program), str(begun)],
        cwd=ROOT,
        env=machine | {"PYTHON": sys.executable, "ACCELERATE_USE_CPU": "true", "NPROC": "1"},
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    STARTED.append(process)
    while not begun.exists() and process.poll() is None:
        time.sleep(0.1)
    # To all processes, as from a terminal that closes.
    os.killpg(process.pid, signal.SIGHUP)
    output, _ = process.communicate(timeout=480)
    assert process.returncode == 0, output


def steps(out: Path) -> list[int]:
    """Those in the metrics of a run's alignment, as far as they are written."""
    path = out / ALIGNED / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.launched
def test_a_preempted_job_saves_and_its_second_start_finishes_the_run(
    machine: dict[str, str], tmp_path: Path
) -> None:
    """Two processes that really train, on one machine."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    one_machine = machine | {
        "PYTHON": sys.executable,
        "PYTHONPATH": paths,
        "CONFIG": "launch/ddp.yaml",
        "SLURM_JOB_NUM_NODES": "1",
        "NPROC": "2",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
    }
    out = tmp_path / "run"
    arguments = [*TRAIN, "--out", str(out), "--align.steps", "40"]
    status, output = run(
        "slurm.sbatch",
        one_machine,
        *arguments,
        stop=(signal.SIGUSR1, lambda: len(steps(out)) >= 3),
    )
    assert status == 0, output
    assert f"requeue {JOB}" in recorded(one_machine, "scontrol"), output
    saved = [path.name for path in (out / ALIGNED / "checkpoints").iterdir()]
    assert saved == [f"step-{steps(out)[-1]:08d}"]
    assert steps(out)[-1] < 40

    (Path(one_machine["RECORD"]) / "scontrol").unlink()
    status, output = run("slurm.sbatch", {**one_machine, "SLURM_RESTART_COUNT": "1"}, *arguments)
    assert status == 0, output
    assert (out / "report.md").exists(), output
    assert steps(out) == list(range(1, 41)), "none twice, none left out"
    assert f"requeue {JOB}" not in recorded(one_machine, "scontrol")
