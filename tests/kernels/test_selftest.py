"""The first use of a kernel in a child process: crashes, hangs and wrong values there are verdicts
here."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from messages import has_facts, logged_by

pytest.importorskip("triton", reason="triton is not installed")

from children import plant
from choices import choice_on_gpu, forget_choices
from hybrid_kernels import common, known_bad, selftest
from hybrid_kernels.definitions import TESTS

pytestmark = pytest.mark.skipif(
    not common.INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
)

CPU = torch.device("cpu")
KERNELS = Path(selftest.__file__).parents[1]
PLANTED = """
import os, signal, sys, time
if "hybrid_kernels.selftest" in sys.orig_argv:
    from hybrid_kernels import definitions

    def crashes(draw, *sizes, **options):
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(draw, *sizes, **options):
        time.sleep(600)

    def is_wrong(draw, *sizes, **options):
        yield "output", 2 * draw(3), draw(3) + 10

    def is_right(draw, *sizes, **options):
        with open(os.environ["TRIALS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        x = draw(3)
        yield "output", x, x

    definitions.TESTS |= {"recurrence": crashes, "convolution": hangs, "decoding step": is_wrong,
                        "distillation loss": is_right}
"""


# A process that asks for the right kernel in several sizes.
ASKING = """
import sys, torch
from hybrid_kernels import selftest

trials = []
for size in sys.argv[1:]:
    device = torch.device("cpu")
    trials.append(selftest.trial_of("distillation loss", device, torch.float32, int(size)))
assert selftest.check_kernels(trials) == [None] * len(trials)
"""
# A student's step on a CPU.
ON_CPU = """
import sys, torch
from hybrid_distill.model import SSMHeads

heads = SSMHeads(8, 2, 4, 4, 4)
heads.reset_parameters()
heads(torch.zeros(1, 5, 8)).sum().backward()
import hybrid_kernels.loss

assert not {"hybrid_kernels.selftest", "hybrid_kernels.definitions"} & set(sys.modules)
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels' tests that crash, hang, find a mistake and find none, in child processes only; a
    file of the latter."""
    plant(PLANTED, tmp_path, monkeypatch)
    monkeypatch.setenv("TRIALS", str(tmp_path / "trials"))
    monkeypatch.setattr(selftest, "_mistakes", {})
    return tmp_path / "trials"


def asked(kernel: str) -> selftest.Trial:
    return selftest.trial_of(kernel, CPU, torch.float32, 16, 4, training=True)


def n_tried(trials: Path) -> int:
    """Count the right kernel's tests: each writes its process to the file."""
    return len(trials.read_text().split())


@pytest.mark.launched
def test_a_crash_and_a_wrong_value_are_verdicts_and_the_other_kernels_are_tried_all_the_same(
    planted: Path,
) -> None:
    right = asked("distillation loss")
    crash = asked("recurrence")
    wrong = asked("decoding step")

    of_right, of_crash, of_wrong, of_right_again = selftest.check_kernels(
        [right, crash, wrong, right]
    )
    assert of_right is None
    assert of_right_again is None
    assert of_crash
    assert "SIGSEGV" in of_crash
    assert of_wrong
    assert "output" in of_wrong
    assert n_tried(planted) == 1

    # Another process of the machine tries nothing again.
    selftest._mistakes.clear()
    assert selftest.check_kernels([right, crash, wrong]) == [of_right, of_crash, of_wrong]
    assert n_tried(planted) == 1

    # After some time, only a verdict against a kernel is forgotten.
    for file in (planted.parent / "verdicts").glob("*.json"):
        record = json.loads(file.read_text())
        record["time"] -= selftest.RETRY_AFTER
        file.write_text(json.dumps(record))
    folder = selftest._shared_folder()
    assert selftest._read(folder, right) == (None,)
    assert selftest._read(folder, crash) is None


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Kernels of each child; nothing is tested, and all are right."""
    monkeypatch.setenv("HYBRID_KERNELS_CACHE", str(tmp_path / "verdicts"))
    monkeypatch.setattr(selftest, "_mistakes", {})
    children: list[list[str]] = []

    def find_right(trials):
        children.append([trial.kernel for trial in trials])
        yield from [None] * len(trials)

    monkeypatch.setattr(selftest, "_ask_child", find_right)
    return children


def infos(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.INFO]


def waits_for_another(caplog: pytest.LogCaptureFixture) -> bool:
    return bool(logged_by(caplog, selftest._wait_for_one))


def test_a_child_logs_its_begin_and_its_end_and_known_verdicts_log_nothing(
    tried: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    trials = [asked("recurrence"), asked("convolution")]
    with caplog.at_level(logging.INFO, logger="hybrid_kernels"):
        assert selftest.check_kernels(trials) == [None, None]
        begin, end = infos(caplog)
        for line in (begin, end):
            assert has_facts(line, "recurrence", "convolution", "cpu")
            assert "\n" not in line
        # By this process, then by a new one.
        selftest.check_kernels(trials)
        selftest._mistakes.clear()
        selftest.check_kernels(trials[::-1])
    assert len(infos(caplog)) == 2
    assert len(tried) == 1


def held(trial: selftest.Trial) -> selftest._Lock:
    """Lock a trial as another process does: a lock belongs to an open file."""
    lock = selftest._Lock(selftest._lock_file(selftest._shared_folder(), trial))
    assert lock.take(wait=False)
    return lock


def test_a_kernel_that_another_process_tests_stops_no_other_one(
    tried: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    slow = asked("gated delta rule")
    other = asked("recurrence")
    third = asked("convolution")
    lock = held(slow)
    assert selftest.check_kernels([other]) == [None]
    assert tried == [["recurrence"]]

    # One that needs both tests its own first, then takes the verdict of the other process.
    with ThreadPoolExecutor(1) as thread, caplog.at_level(logging.INFO, logger="hybrid_kernels"):
        both = thread.submit(selftest.check_kernels, [slow, third])
        while not waits_for_another(caplog):
            assert not both.done()
            time.sleep(0.01)
        assert tried == [["recurrence"], ["convolution"]]
        # While it waits, what it has tested is free.
        held(third).close()
        selftest._write(selftest._shared_folder(), slow, "it is off by 3")
        lock.close()
        assert both.result(timeout=60) == ["it is off by 3", None]
    assert len(tried) == 2


def test_a_process_that_ends_without_a_verdict_leaves_the_test_to_the_next_one(
    tried: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    lock = held(asked("recurrence"))
    with ThreadPoolExecutor(1) as thread, caplog.at_level(logging.INFO, logger="hybrid_kernels"):
        waiting = thread.submit(selftest.check_kernels, [asked("recurrence")])
        while not infos(caplog):
            assert not waiting.done()
            time.sleep(0.01)
        assert not tried
        lock.close()
        assert waiting.result(timeout=60) == [None]
    assert tried == [["recurrence"]]


@pytest.mark.launched
def test_processes_with_overlapping_kernels_in_any_order_share_verdicts(planted: Path) -> None:
    """None waits for another one forever, and no verdict is made twice."""
    processes = []
    for sizes in ("123", "321", "231"):
        command = [sys.executable, "-c", ASKING, *sizes]
        processes.append(subprocess.Popen(command, cwd=KERNELS))
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    assert n_tried(planted) == 3


@pytest.mark.parametrize("case", ["no folder", "no lock files", "no locks"])
def test_where_nothing_can_be_locked_each_process_tests_for_itself(
    case: str, tried: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [asked("recurrence"), asked("convolution")]
    if case == "no folder":
        monkeypatch.setenv("HYBRID_KERNELS_CACHE", "/dev/null/nowhere")
    elif case == "no lock files":
        monkeypatch.setattr(selftest, "_lock_file", lambda *_: tmp_path)
    else:

        def refuse(*_):
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr(selftest.fcntl, "flock", refuse)
    assert selftest.check_kernels(trials) == [None, None]
    kernels = [kernel for child in tried for kernel in child]
    assert sorted(kernels) == ["convolution", "recurrence"]


def test_devices_of_one_kind_share_a_verdict(
    tried: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lock is one too: a process must not wait for itself."""
    monkeypatch.setattr(selftest, "_kind", lambda device: "a GPU")
    first = asked("recurrence")
    trials = [first._replace(device="cuda:0"), first._replace(device="cuda:1")]
    assert selftest.check_kernels(trials) == [None, None]
    assert tried == [["recurrence"]]


@pytest.mark.launched
def test_a_hang_ends_and_torch_takes_over_with_one_line(planted: Path, monkeypatch, caplog) -> None:
    assert selftest.TIME_LIMIT > 60, "triton compiles under it"
    monkeypatch.setattr(selftest, "TIME_LIMIT", 0.5)
    forget_choices(monkeypatch)
    for _ in range(2):
        assert choice_on_gpu("convolution", torch.float32, (4,)) == "torch"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "0.5 s" in record.message
    assert "\n" not in record.message


@pytest.mark.launched
def test_the_right_kernel_is_right_in_a_child_too(tmp_path: Path, monkeypatch) -> None:
    """With a launcher's variables, which the child must not see."""
    monkeypatch.setenv("HYBRID_KERNELS_CACHE", str(tmp_path / "verdicts"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(selftest, "_mistakes", {})
    options = {"masked": True, "training": False}
    verdict = selftest.check_kernel("decoding step", CPU, torch.float32, 16, 4, 4, **options)
    assert verdict is None


def test_without_a_second_process_the_test_runs_in_this_one(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """A device in exclusive mode, or full."""
    monkeypatch.setenv("HYBRID_KERNELS_CACHE", "/dev/null/nowhere")
    monkeypatch.setattr(selftest, "_mistakes", {})
    monkeypatch.setattr(selftest.sys, "executable", str(tmp_path / "no-python"))

    def is_wrong(draw, *sizes, **options):
        yield "y", draw(2), draw(2) * 0

    monkeypatch.setitem(TESTS, "convolution", is_wrong)
    verdict = selftest.check_kernel("convolution", CPU, torch.float32, 3, training=False)
    assert verdict
    assert has_facts(verdict, "y")
    assert "no-python" in caplog.text


def test_no_child_is_started_where_there_is_no_gpu() -> None:
    """Importing the package and a step of a student on a CPU import neither triton's kernels nor
    their trials."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", ON_CPU], check=True, env=environment)


@pytest.mark.parametrize(
    ("triton", "capability", "hip", "kernel", "is_bad"),
    [
        ("3.7.1", (9, 0), None, "recurrence", True),
        ("3.7.1+git1234", (9, 0), None, "recurrence", True),
        ("3.7.1", (9, 0), None, "gated delta rule", True),
        ("3.7.1", (9, 0), None, "convolution", False),  # it multiplies no matrices
        ("3.7.1", (8, 0), None, "recurrence", False),
        ("3.7.1", (9, 0), "6.4", "recurrence", False),  # an MI200
        ("3.7.0", (9, 0), None, "recurrence", False),
        ("3.9.0", (9, 0), None, "recurrence", False),
    ],
)
def test_what_is_reported_to_fail_is_not_tried(
    triton, capability, hip, kernel, is_bad, monkeypatch
) -> None:
    """triton-lang/triton#11366: illegal addresses of wgmma on Hopper."""
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=triton))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    reason = known_bad.known_bad(kernel, torch.device("cuda"))
    assert (reason is not None) == is_bad
    if reason is not None:
        assert "3.7.1" in reason
        assert "11366" in reason
        assert "\n" not in reason


def test_every_row_names_kernels_that_exist() -> None:
    for row in known_bad.KNOWN_BAD:
        assert set(row.kernels) <= set(TESTS)


def test_auto_reads_the_table(monkeypatch, caplog) -> None:
    monkeypatch.setattr(known_bad, "known_bad", lambda kernel, device: f"{kernel} is known to fail")
    monkeypatch.setattr(selftest, "check_kernel", lambda *_, **__: pytest.fail("it was tried"))
    forget_choices(monkeypatch)
    assert choice_on_gpu("recurrence", torch.bfloat16, (64, 16)) == "torch"
    assert "recurrence is known to fail" in caplog.text
