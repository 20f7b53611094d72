"""Processes wait for one another, but not for one that is gone; all must see one folder.

This file is also the program that each of two processes runs: ``test_exchange.py OUT``.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).parents[1]),
        str(Path(__file__).parents[1] / "kernels"),
    ]

import torch

from hybrid_distill import distributed, exchange
from hybrid_distill.distributed import (
    agree_on,
    alone_in,
    compute_everywhere,
    connect,
    disconnect,
    from_main,
    limit_collectives,
    on_main_process,
    wait_for_all,
)
from hybrid_distill.locking import InUse, locked

LIMIT_S = 1.0
"""Longest collective in the program; with NCCL it is 10 minutes."""
LONGER_S = 2.5


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
    for process in results:
        assert process["collective"] == "too long", "the limit is real"
        assert process[f"{late} is late"] > LONGER_S - 0.5


@pytest.mark.launched
def test_values_of_every_size_arrive_in_rank_order(results):
    in_order = [list(pair) for pair in itertools.product(range(20), range(2))]
    for process in results:
        assert [[number, rank] for rank, number in process["gathered"]] == in_order
        assert process["large"] == [3_000_000, 2_999_999]


@pytest.mark.launched
def test_what_the_store_held_is_removed(results):
    assert results[0]["keys left"] < 30, "of over 100"


@pytest.mark.launched
def test_an_error_of_one_process_is_one_in_the_others(results):
    assert [process["main fails"] for process in results] == [
        "ValueError",
        "OtherProcessError",
    ]
    assert [process["other fails"] for process in results] == [
        "OtherProcessError",
        "ValueError",
    ]


@pytest.mark.launched
def test_a_folder_in_use_is_refused_by_all_after_any_patience(results):
    assert [process["in use"] for process in results] == ["InUse", "InUse"]


@pytest.mark.launched
def test_a_folder_that_one_process_does_not_see_is_refused_by_all(tmp_path):
    from processes import start_two

    homes = []
    for rank in range(2):
        home = tmp_path / str(rank)
        home.mkdir()
        homes.append({"HOME_OF_PROCESS": str(home)})
    ended = start_two(Path(__file__), "folders", own=homes)
    assert [process.out.strip() for process in ended] == ["UnsharedFolder"] * 2, ended
    assert [list((tmp_path / str(rank)).rglob("*.token")) for rank in range(2)] == [[], []]
    assert not (tmp_path / "1" / "run").exists(), "the main process alone writes"


@pytest.mark.launched
@pytest.mark.parametrize(("how", "status"), [("killed", -signal.SIGKILL), ("failed", 3)])
def test_a_process_that_is_gone_ends_the_wait(how, status):
    """One that ends by itself does so at once; one that is killed stops its heartbeat."""
    from processes import start_two

    ended = start_two(Path(__file__), how)
    assert [process.status for process in ended] == [0, status], ended
    assert ended[0].out.strip() == "OtherProcessError"


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


def waits(out: Path) -> None:
    """Be late in every way."""
    rank = connect().process_index
    results: dict[str, object] = {}
    wait_for_all()
    limit_collectives(LIMIT_S / 60)
    results["main is late"] = seconds_of(
        lambda: on_main_process(lambda: time.sleep(LONGER_S))
    )

    def other_is_late() -> None:
        if rank == 1:
            time.sleep(LONGER_S)
        on_main_process(lambda: None)

    results["other is late"] = seconds_of(other_is_late)
    gathered: list[tuple[int, int]] = []
    for number in range(20):
        gathered += compute_everywhere(lambda: (rank, number))  # noqa: B023
    results["gathered"] = gathered
    large = agree_on(lambda: torch.arange(3_000_000) + rank)
    results["large"] = [len(large), int(large[-1])]
    # Whoever has come to the second has removed what all had read at the first.
    wait_for_all()
    wait_for_all()
    assert distributed._open_exchange is not None
    results["keys left"] = distributed._open_exchange.store.num_keys()
    results["main fails"] = kind_of_error(lambda: on_main_process(fail))

    def other_fails() -> None:
        if rank == 1:
            fail()

    results["other fails"] = kind_of_error(lambda: compute_everywhere(other_fails))

    def take() -> None:
        with alone_in(out / "taken", patience=LONGER_S):
            pass

    if rank == 0:
        with locked(out / "taken"):
            results["in use"] = kind_of_error(take)
    else:
        results["in use"] = kind_of_error(take)
    assert from_main(lambda: rank) == 0

    def meet() -> None:
        if rank == 0:
            time.sleep(LONGER_S)
        torch.distributed.barrier()

    results["collective"] = "too long" if kind_of_error(meet) else "in time"
    (out / f"{rank}.json").write_text(json.dumps(results))


def folders() -> None:
    """Write to one path that is another folder in each process."""
    distributed.SEEN_WITHIN_S = 0.5
    os.chdir(os.environ["HOME_OF_PROCESS"])

    def write() -> None:
        with alone_in(Path("run")):
            pass

    print(kind_of_error(write), flush=True)
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


def failed() -> None:
    """Wait for a process that has ended with an error, on its own."""
    rank = connect().process_index
    wait_for_all()
    if rank == 1:
        sys.exit(3)
    print(kind_of_error(wait_for_all), flush=True)


if __name__ == "__main__":
    assert issubclass(InUse, ValueError)
    programs = {"waits": waits, "folders": folders, "killed": killed, "failed": failed}
    programs[sys.argv[1]](*map(Path, sys.argv[2:]))
