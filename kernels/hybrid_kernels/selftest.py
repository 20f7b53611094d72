"""First use of a kernel, tried where a failure does no harm: in a child process, with a time limit.

An illegal address ends a process's use of its GPU for good, and a compiler can abort or hang: a
test in the caller's own process could not hand over to torch. So a child runs `definitions`;
whatever becomes of it is a verdict.

The processes of a machine share verdicts as files below ~/.cache (HYBRID_KERNELS_CACHE names
another folder). Each verdict has a lock of its own: the first process that needs it tests the kernel,
others that need it wait, and those that need other verdicts go on. A process that waits for a lock
holds none, so no two wait for each other. A verdict
belongs to one version of torch, triton, CUDA, driver and kernels, and to one kind of device. That a
kernel is right stays true; that it is not holds for `RETRY_AFTER`, long enough for all processes of
a launch and short enough for a device that was full or has been repaired.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import triton

log = logging.getLogger(__name__)

START_LIMIT = 180.0
"""Seconds for the child's start: torch from a slow disk, and the device."""
TIME_LIMIT = 180.0
"""Seconds for one kernel's test; compiling takes most of them."""
TIME_LIMITS = {"gated delta rule": 900.0}
"""Longer ones: flash-linear-attention compiles some 75 programs to choose from, 2 seconds each."""
RETRY_AFTER = 600.0
"""Seconds for which a verdict against a kernel is shared."""
READY = "ready"
LAUNCHER_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "ACCELERATE_",
    "TORCHELASTIC_",
    "FSDP_",
)
"""Beginnings of variables that would make the child a member of the caller's launch."""


class Trial(NamedTuple):
    """Arguments of `definitions.mistake_of`, as JSON holds them."""

    kernel: str
    device: str
    dtype: str
    sizes: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


class Verdict(NamedTuple):
    """Result of a trial."""

    mistake: str | None
    """Mistake of the kernel, in one line; None if it is right."""


class NoChild(RuntimeError):
    """No second process can use this device."""


_mistakes: dict[Trial, str | None] = {}
"""Mistake of each kernel that this process knows the verdict of; None for one that is right."""


def trial_of(
    kernel: str, device: torch.device, dtype: torch.dtype, *sizes: int, **options: Any
) -> Trial:
    """Describe a call of `check_kernel`."""
    name = str(dtype).removeprefix("torch.")
    return Trial(kernel, str(device), name, tuple(map(int, sizes)), tuple(sorted(options.items())))


def check_kernel(
    kernel: str, device: torch.device, dtype: torch.dtype, *sizes: int, **options: Any
) -> str | None:
    """Return what is wrong with a kernel on a device, as `definitions.mistake_of` does, but survive
    whatever it does."""
    if device.type == "cuda" and not torch.cuda.is_available():  # of a fake tensor
        return None
    return check_kernels([trial_of(kernel, device, dtype, *sizes, **options)])[0]


def check_kernels(trials: Sequence[Trial]) -> list[str | None]:
    """Return the mistake of each trial's kernel, None if it is right. One child process tests those
    without a verdict that no other process is testing; the others are waited for."""
    folder = None
    if any(trial not in _mistakes for trial in trials):
        folder = _shared_folder()
    while unknown := _unknown(trials, folder):
        with contextlib.ExitStack() as locks:
            locked = _lock_free_ones(unknown, folder, locks)
            if not locked:
                # Others are testing all of them. Wait for one, then look at its verdict.
                locked = _wait_for_one(unknown, folder, locks)
            # A process that has just ended may have left verdicts.
            to_test = [trial for trial in _unknown(unknown, folder) if trial in locked]
            for trial, mistake in _test_all(to_test, folder):
                _mistakes[trial] = mistake
                _write(folder, trial, mistake)
                # Processes that wait for this verdict need not wait for the next one.
                locked[trial].close()
    return [_mistakes[trial] for trial in trials]


def _unknown(trials: Sequence[Trial], folder: Path | None) -> list[Trial]:
    """Return the trials without a verdict, each once, after reading those of other processes."""
    unknown = []
    for trial in dict.fromkeys(trials):
        if trial in _mistakes:
            continue
        verdict = _read(folder, trial)
        if verdict is None:
            unknown.append(trial)
        else:
            _mistakes[trial] = verdict.mistake
    return unknown


def _test_all(trials: Sequence[Trial], folder: Path | None) -> Iterator[tuple[Trial, str | None]]:
    """Yield each trial with its kernel's mistake as soon as it is known. A child ends with the first
    kernel that is not right: an illegal address would make all later ones look wrong."""
    remaining = list(trials)
    while remaining:
        begin = time.monotonic()
        storage = f"stay in {folder}"
        if folder is None:
            storage = "are not kept: no folder can be written"
        log.info("testing %s, once (verdicts %s)", _describe(remaining), storage)
        tested = []
        try:
            for mistake in _ask_child(remaining):
                trial = remaining.pop(0)
                tested.append(trial)
                yield trial, mistake
        except NoChild as error:
            log.warning("kernels are tested in this process, where a crash would end it: %s", error)
            while remaining:
                trial = remaining.pop(0)
                tested.append(trial)
                yield trial, _test_here(trial)
        log.info("tested %s in %.0f s", _describe(tested), time.monotonic() - begin)


def _describe(trials: Sequence[Trial]) -> str:
    """Name the kernels and the devices of trials."""
    kernels = dict.fromkeys(trial.kernel for trial in trials)
    devices = dict.fromkeys(trial.device for trial in trials)
    return f"{', '.join(kernels)} on {', '.join(devices)}"


def _ask_child(trials: Sequence[Trial]) -> Iterator[str | None]:
    """Yield the mistakes of the first trials, at least one, as a new child process finds them.

    Raises NoChild if the child does not come as far as the first trial.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)
    }
    # A pipe of its own: compilers and drivers print to standard output.
    answers, child_writes = os.pipe()
    command = [sys.executable, "-m", f"{__package__}.selftest", str(child_writes)]
    try:
        child = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],  # where -m finds this package
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[child_writes],
        )
    except OSError as error:
        os.close(answers)
        raise NoChild(f"no process can be started ({error})") from error
    finally:
        os.close(child_writes)
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin as questions:
            questions.write(json.dumps(trials).encode())
        reader = _Lines(answers)
        first = reader.next(START_LIMIT)
        if first != READY:
            raise NoChild(first or f"a child {_how_it_ended(child, START_LIMIT)}")
        # Copied: the caller's list may shrink meanwhile.
        for trial in tuple(trials):
            limit = TIME_LIMITS.get(trial.kernel, TIME_LIMIT)
            line = reader.next(limit)
            if line is None:
                yield f"on {trial.device} its test {_how_it_ended(child, limit)}"
                return
            mistake = json.loads(line)
            yield mistake
            if mistake is not None:
                return
    finally:
        # A hanging kernel cannot be interrupted in any other way.
        child.kill()
        child.wait()
        os.close(answers)


class _Lines:
    """Lines that a child writes to a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._received = b""

    def next(self, limit: float) -> str | None:
        """Wait for a line for ``limit`` seconds; return None if none comes, or the child has
        ended."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._received:
            left = max(deadline - time.monotonic(), 0.0)
            readable, _, _ = select.select([self._descriptor], [], [], left)
            received = os.read(self._descriptor, 1 << 16) if readable else b""
            if not received:
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()


def _how_it_ended(child: subprocess.Popen[bytes], limit: float) -> str:
    """Describe a child that has stopped answering."""
    try:
        status = child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return f"takes more than {limit:g} s"
    if status < 0:
        return f"dies of {signal.Signals(-status).name}"
    return f"ends with status {status}"


def _test_here(trial: Trial) -> str | None:
    from .definitions import mistake_of

    dtype = getattr(torch, trial.dtype)
    return mistake_of(
        trial.kernel, torch.device(trial.device), dtype, *trial.sizes, **dict(trial.options)
    )


# Shared verdicts


def _shared_folder() -> Path | None:
    """Return the folder of verdicts; None where it cannot be made."""
    base = os.environ.get("HYBRID_KERNELS_CACHE")
    try:
        if base is None:
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            base = Path(cache) / "hybrid-kernels"
        folder = Path(base)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a full disk, or no home
        return None
    return folder


class _Lock:
    """The right to test one kernel, alone on this machine; without effect where nothing can be
    locked."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            # A disk that is full or may only be read: each process tests for itself.
            with contextlib.suppress(OSError):
                self._file = path.open("a")

    def take(self, wait: bool) -> bool:
        """Lock it; return False if another process holds it and ``wait`` is not set."""
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # A file system without locks.
            return True
        return True

    def close(self) -> None:
        """Let others take it. Closing the file alone would not, if a fork of this process has it."""
        if self._file is None or self._file.closed:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _lock_free_ones(
    trials: Sequence[Trial], folder: Path | None, locks: contextlib.ExitStack
) -> dict[Trial, _Lock]:
    """Lock the trials that no other process is testing, without waiting for any."""
    locked: dict[Trial, _Lock] = {}
    paths: set[Path] = set()
    # In one order in all processes: the first one then gets all that it shares with the others.
    for trial in sorted(trials, key=lambda trial: _lock_file(folder, trial) or Path()):
        path = _lock_file(folder, trial)
        # GPUs of one kind share a verdict: the second one reads it.
        if path is not None and path in paths:
            continue
        lock = _Lock(path)
        locks.callback(lock.close)
        if lock.take(wait=False):
            locked[trial] = lock
            if path is not None:
                paths.add(path)
    return locked


def _wait_for_one(
    trials: Sequence[Trial], folder: Path | None, locks: contextlib.ExitStack
) -> dict[Trial, _Lock]:
    """Wait until another process has tested the first of the trials, or has ended."""
    trial = trials[0]
    log.info("another process is testing %s; waiting for its verdict", _describe([trial]))
    lock = _Lock(_lock_file(folder, trial))
    locks.callback(lock.close)
    lock.take(wait=True)
    return {trial: lock}


def _lock_file(folder: Path | None, trial: Trial) -> Path | None:
    return None if folder is None else _file(folder, trial).with_suffix(".lock")


def _file(folder: Path, trial: Trial) -> Path:
    key = json.dumps([_versions(), _kind(trial.device), trial._replace(device="")])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(folder: Path | None, trial: Trial) -> Verdict | None:
    """Return a shared verdict; None if there is none that holds."""
    if folder is None:
        return None
    try:
        record = json.loads(_file(folder, trial).read_text())
        mistake = record["mistake"]
        written_at = float(record["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_old = not 0 <= time.time() - written_at < RETRY_AFTER
    if mistake is not None and (is_old or not isinstance(mistake, str)):
        return None
    return Verdict(mistake)


def _write(folder: Path | None, trial: Trial, mistake: str | None) -> None:
    if folder is None:
        return
    file = _file(folder, trial)
    record = {
        "trial": trial,
        "of": [_versions(), _kind(trial.device)],
        "mistake": mistake,
        "time": time.time(),
    }
    new = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(record))
        # Atomic: a process that reads at this moment sees the old file or the new one.
        new.replace(file)


@functools.cache
def _versions() -> list[str]:
    """Name all that a verdict depends on besides the device: versions, the machine, and the
    kernels' own code."""
    code = hashlib.sha256()
    # A changed kernel has no verdict yet.
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
    # The gated delta rule is another package's.
    try:
        foreign = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        foreign = ""
    driver = str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "")())
    cuda = str(torch.version.cuda or torch.version.hip)
    interpreted = os.environ.get("TRITON_INTERPRET", "")
    machine = platform.node()
    return [
        torch.__version__,
        triton.__version__,
        cuda,
        driver,
        interpreted,
        machine,
        foreign,
        code.hexdigest(),
    ]


@functools.cache
def _kind(device: str) -> str:
    """Name a kind of device: all GPUs of a node are of one kind."""
    if torch.device(device).type != "cuda":
        return platform.machine()
    return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


# The child


def _answer(trials: list[Trial], descriptor: int) -> None:
    """Write a line for each trial, up to the first kernel that is not right."""
    with open(descriptor, "w", buffering=1, encoding="utf-8") as answers:
        try:
            # Use the device before READY: refusing a second process is not a verdict.
            for device in {trial.device for trial in trials}:
                torch.ones(1, device=device).sum().item()
        except Exception as error:  # the device is full, or belongs to one process alone
            answers.write(f"{str(error).splitlines()[0]}\n")
            return
        answers.write(f"{READY}\n")
        for trial in trials:
            mistake = _test_here(trial)
            answers.write(f"{json.dumps(mistake)}\n")
            if mistake is not None:
                return


def main() -> None:
    """Test the kernels that are asked for on standard input; write verdicts to the given file
    descriptor."""
    trials = []
    for kernel, device, dtype, sizes, options in json.load(sys.stdin):
        pairs = tuple((name, value) for name, value in options)
        trials.append(Trial(kernel, device, dtype, tuple(sizes), pairs))
    _answer(trials, int(sys.argv[1]))


if __name__ == "__main__":
    main()
