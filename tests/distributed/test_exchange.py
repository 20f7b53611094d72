"""Processes wait for one another, but not for one that is gone; all must see one folder.

This file is also the program that each of two processes runs: ``test_exchange.py PROGRAM [OUT]``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    ROOT = Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch

from hybrid_distill.distributed import (
    agree_on,
    alone_in,
    compute_everywhere,
    connect,
    disconnect,
    exchange,
    from_main,
    limit_collectives,
    on_main_process,
    rank_and_world,
    shared_folder,
    wait_for_all,
)
from hybrid_distill.locking import locked

LIMIT_S = 0.8
"""Longest collective in the program; with NCCL it is 10 minutes."""
LATE_S = 1.6


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Findings of each process."""
    from processes import start_two

    out = tmp_path_factory.mktemp("exchange")
    ended = start_two(Path(__file__), "waits", out)
    assert [process.status for process in ended] == [0, 0], ended
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.launched
@pytest.mark.parametrize("late", ["main", "other"])
def test_a_wait_is_longer_than_a_collective_may_be(results, late):
    for findings in results:
        assert findings["collective"], "the limit is real"
        assert findings[f"{late} is late"] > LATE_S - 0.5


@pytest.mark.launched
def test_values_of_every_size_arrive_in_rank_order(results):
    expected = []
    for number in range(20):
        expected += [[0, number], [1, number]]
    for findings in results:
        assert findings["gathered"] == expected
        assert findings["large"] == [3_000_000, 2_999_999]


@pytest.mark.launched
def test_what_the_store_held_is_removed(results):
    assert results[0]["keys left"] < 30, "of over 100"


@pytest.mark.launched
@pytest.mark.parametrize(
    ("event", "errors"),
    [
        ("main fails", ["ValueError", "OtherProcessError"]),
        ("other fails", ["OtherProcessError", "ValueError"]),
        ("in use", ["InUse", "InUse"]),
    ],
)
def test_an_error_of_one_process_is_one_in_the_others(results, event, errors):
    """A folder in use is refused by all, with the same error, after any patience."""
    assert [findings[event] for findings in results] == errors


@pytest.mark.launched
def test_a_folder_that_one_process_does_not_see_is_refused_by_all(tmp_path):
    from processes import start_two

    homes = []
    for rank in range(2):
        home = tmp_path / str(rank)
        home.mkdir()
        homes.append({"HOME_OF_PROCESS": str(home)})
    ended = start_two(Path(__file__), "folders", own=homes)
    assert [process.out.split()[0] for process in ended] == ["UnsharedFolder"] * 2, ended
    assert not list(tmp_path.rglob("*.token"))
    assert not (tmp_path / "1" / "run").exists(), "the main process alone writes"
    # The other one then ended with an error of its own.
    assert [process.status for process in ended] == [0, 3]
    assert ended[0].out.split()[1:] == ["OtherProcessError"]


@pytest.mark.launched
def test_a_process_that_is_killed_ends_the_wait():
    """Its heartbeat stands still."""
    from processes import start_two

    ended = start_two(Path(__file__), "killed")
    assert [process.status for process in ended] == [0, -signal.SIGKILL], ended
    assert ended[0].out.strip() == "OtherProcessError"


# The programs.


def seconds_of(action) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def kind_of_error(action) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def fail() -> None:
    raise ValueError("broken")


def sleep_if(condition: bool) -> None:
    if condition:
        time.sleep(LATE_S)


def waits(out: Path) -> None:
    """Be late, and fail, in every way."""
    rank = connect().process_index
    findings: dict[str, object] = {}
    wait_for_all()
    limit_collectives(LIMIT_S / 60)
    findings["main is late"] = seconds_of(lambda: on_main_process(lambda: time.sleep(LATE_S)))

    def other_is_late() -> None:
        sleep_if(rank == 1)
        on_main_process(lambda: None)

    findings["other is late"] = seconds_of(other_is_late)
    findings["gathered"] = gather_often(rank)
    large = agree_on(lambda: torch.arange(3_000_000) + rank)
    findings["large"] = [len(large), int(large[-1])]
    # Whoever has come to the second has removed what all had read at the first.
    wait_for_all()
    wait_for_all()
    findings["keys left"] = exchange.open_exchange(*rank_and_world()).store.num_keys()
    findings["main fails"] = kind_of_error(lambda: on_main_process(fail))

    def other_fails() -> None:
        if rank == 1:
            fail()

    findings["other fails"] = kind_of_error(lambda: compute_everywhere(other_fails))
    findings["in use"] = take_what_is_in_use(rank, out / "taken")
    assert from_main(lambda: rank) == 0

    def meet_late() -> None:
        sleep_if(rank == 0)
        torch.distributed.barrier()

    findings["collective"] = kind_of_error(meet_late)
    (out / f"{rank}.json").write_text(json.dumps(findings))


def gather_often(rank: int) -> list[tuple[int, int]]:
    gathered: list[tuple[int, int]] = []
    for number in range(20):
        gathered += compute_everywhere(lambda: (rank, number))  # noqa: B023
    return gathered


def take_what_is_in_use(rank: int, folder: Path) -> str:
    def take() -> None:
        with alone_in(folder, patience=LATE_S):
            pass

    if rank != 0:
        return kind_of_error(take)
    with locked(folder):
        return kind_of_error(take)


def folders() -> None:
    """Write to one path that is another folder in each process; then one ends by itself."""
    shared_folder.SEEN_WITHIN_S = 0.5
    rank = connect().process_index
    os.chdir(os.environ["HOME_OF_PROCESS"])

    def write() -> None:
        with alone_in(Path("run")):
            pass

    print(kind_of_error(write), flush=True)
    if rank == 1:
        sys.exit(3)
    print(kind_of_error(wait_for_all), flush=True)
    disconnect()


def killed() -> None:
    """Wait for a process that has been killed."""
    exchange.BEAT_S = 0.1
    exchange.SILENCE_S = 2.0
    rank = connect().process_index
    wait_for_all()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print(kind_of_error(wait_for_all), flush=True)


if __name__ == "__main__":
    programs = {"waits": waits, "folders": folders, "killed": killed}
    programs[sys.argv[1]](*map(Path, sys.argv[2:]))
