"""Exchange of values between processes through the rendezvous store, without a time limit.

A collective ends with an error when one process is late: after 10 minutes with NCCL. Whatever one
process may do alone, or much more slowly than the others (tokenize, download, evaluate, export),
therefore waits here. Heartbeats replace the time limit: a wait ends if that of an awaited process
stands still.
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .validation import first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

BEAT_S = 5.0
"""Seconds between two heartbeats."""
SILENCE_S = 300.0
"""Seconds without a heartbeat after which a process counts as gone. Libraries may hold the
interpreter, and with it the heartbeat, for a while."""
FAREWELL_S = 10.0
"""Longest wait, at the end of a program, for the others to read what is left in the store."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.0005, 0.5, 1.2
"""Pauses between two looks at the store; they grow, so that a long wait costs the store little."""
CAREFUL_PAUSE_S = 0.1
"""Pause from which on a wait also looks whether the other process still runs."""
CHUNK = 2**20  # bytes; the store refuses values of more than a few megabytes


class OtherProcessError(RuntimeError):
    """Another process of this launch failed; its own error message gives the reason."""


class Exchange:
    """Values that the processes of one launch give to one another.

    Every process must make the same calls, in the same order.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._calls = itertools.count()
        self._own_keys: list[tuple[int, str]] = []
        self._is_over = threading.Event()
        # A connection of its own: the store's lock is held while a library waits for a key.
        beats: Any = cast(Any, store).clone() if hasattr(store, "clone") else store
        self._heart = threading.Thread(
            target=self._beat, args=(beats,), name="heartbeat", daemon=True
        )
        self._heart.start()
        atexit.register(self.leave)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in rank order, once all have given theirs."""
        number = next(self._calls)
        self._put(number, value)
        values = [self._get(number, rank) for rank in range(self.world)]
        self._forget_before(number)
        return values

    def from_main(self, compute: Callable[[], T]) -> T:
        """Run ``compute`` on the main process and return its result on all.

        The main process returns once all have the result. An error is raised on the main process
        and, as `OtherProcessError`, on the others.
        """
        number = next(self._calls)
        if self.rank != 0:
            result, error = self._get(number, 0)
            self._put(number, None)
            if error:
                raise OtherProcessError(f"process 0 of {self.world} has failed ({error})")
            return result
        try:
            result = compute()
        except Exception as raised:
            self._put(number, (None, describe_error(raised)))
            raise
        self._put(number, (result, ""))
        # Otherwise the main process would run ahead, into a collective that has a time limit.
        for rank in range(1, self.world):
            self._get(number, rank)
        self._forget_before(number)
        return result

    def leave(self) -> None:
        """Record that this process ends, and stop its heartbeat. Runs at every exit."""
        atexit.unregister(self.leave)
        self._is_over.set()
        # A thread that is inside the store's code while the interpreter ends would crash it.
        self._heart.join(timeout=BEAT_S)
        # If the store is gone, nobody waits any more.
        with suppress(RuntimeError):
            self.store.set(_key("end", self.rank), "")

    def farewell(self) -> None:
        """Leave without an error. The main process, which may hold the store, leaves last."""
        self.leave()
        if self.rank == 0:
            with suppress(RuntimeError):
                wait_for_keys(
                    self.store, [_key("end", rank) for rank in range(self.world)], FAREWELL_S
                )

    def _beat(self, store: Store) -> None:
        for count in itertools.count():
            try:
                store.set(_key("alive", self.rank), str(count))
            except RuntimeError:  # the process that holds the store has ended
                return
            if self._is_over.wait(BEAT_S):
                return

    def _put(self, number: int, value: object) -> None:
        data = pickle.dumps(value)
        parts = [data[begin : begin + CHUNK] for begin in range(0, len(data), CHUNK)]
        for place, part in enumerate(parts):
            self._set(number, _key(number, self.rank, place), part)
        # The key that the others look for comes last.
        self._set(number, _key(number, self.rank), str(len(parts)))

    def _set(self, number: int, key: str, value: Any) -> None:
        with _connected():
            self.store.set(key, value)
        self._own_keys.append((number, key))

    def _get(self, number: int, rank: int) -> Any:
        with _connected():
            if rank != self.rank:
                self._wait_for(_key(number, rank), rank)
            n_parts = int(self.store.get(_key(number, rank)))
            parts = [self.store.get(_key(number, rank, place)) for place in range(n_parts)]
        return pickle.loads(b"".join(parts))

    def _wait_for(self, key: str, rank: int) -> None:
        """Wait until a process has set ``key``. Raises OtherProcessError if it is gone."""
        pause, count, changed = FIRST_PAUSE_S, b"", time.monotonic()
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(PAUSE_GROWTH * pause, LONGEST_PAUSE_S)
            if pause < CAREFUL_PAUSE_S:
                continue
            if self.store.check([_key("end", rank)]) and not self.store.check([key]):
                raise OtherProcessError(
                    f"process {rank} of {self.world} has ended; see its own output for the reason."
                )
            latest = self._heartbeat(rank)
            if latest != count:
                count, changed = latest, time.monotonic()
            elif time.monotonic() - changed > SILENCE_S:
                raise OtherProcessError(
                    f"process {rank} of {self.world} has given no sign of life for {SILENCE_S:g} "
                    "seconds; see its own output for the reason, and run the same command again."
                )

    def _heartbeat(self, rank: int) -> bytes:
        key = _key("alive", rank)
        return self.store.get(key) if self.store.check([key]) else b""

    def _forget_before(self, number: int) -> None:
        """Remove this process's values of earlier calls, which all have read, from the store."""
        with _connected():
            for call, key in self._own_keys:
                if call < number:
                    self.store.delete_key(key)
        self._own_keys = [(call, key) for call, key in self._own_keys if call >= number]


@contextmanager
def _connected() -> Iterator[None]:
    """Turn the error of a store whose holder has ended into an `OtherProcessError`."""
    try:
        yield
    except OtherProcessError:
        raise
    except RuntimeError as error:
        raise OtherProcessError(
            f"the connection to the main process is lost ({first_line(error)}); see its own output "
            "for the reason, and run the same command again."
        ) from error


def _key(*parts: object) -> str:
    return "/".join(["hybrid-distill", *map(str, parts)])


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def wait_for_keys(store: Store, keys: Iterable[str], patience: float) -> list[str]:
    """Wait at most ``patience`` seconds for keys in the store; return those that are not there."""
    pause, end = FIRST_PAUSE_S, time.monotonic() + patience
    missing = list(keys)
    while missing := [key for key in missing if not store.check([key])]:
        if time.monotonic() > end:
            break
        time.sleep(pause)
        pause = min(PAUSE_GROWTH * pause, LONGEST_PAUSE_S)
    return missing
