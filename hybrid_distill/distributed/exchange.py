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

from ..validation import first_line

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
FIRST_PAUSE_S = 0.0005
"""First pause between two looks at the store. Pauses grow, so that a long wait costs the store
little."""
LONGEST_PAUSE_S = 0.5
PAUSE_GROWTH = 1.2
CAREFUL_PAUSE_S = 0.1
"""Pause from which on a wait also looks whether the other process still runs."""
CHUNK = 2**20
"""Bytes of a value in the store, which refuses values of more than a few megabytes."""


class OtherProcessError(RuntimeError):
    """Another process of this launch failed; its own error message gives the reason."""


class Exchange:
    """Values that the processes of one launch give to one another.

    Every process must make the same calls, in the same order.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self._calls = itertools.count()
        self._own_keys: list[tuple[int, str]] = []
        """Number of the call that each key belongs to, and the key."""
        self._is_over = threading.Event()
        # The heartbeat needs a connection of its own: the store's lock is held while a library
        # waits for a key.
        beats: Any = store
        if hasattr(store, "clone"):
            beats = cast(Any, store).clone()
        self._heart = threading.Thread(
            target=self._beat, args=(beats,), name="heartbeat", daemon=True
        )
        self._heart.start()
        # A process that ends with an error never gets to `farewell`, and the others wait for it.
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
            return self._receive(number)
        try:
            result = compute()
        except Exception as error:
            self._put(number, (None, describe_error(error)))
            raise
        self._put(number, (result, ""))
        # Otherwise the main process would run ahead, into a collective that has a time limit.
        for rank in range(1, self.world):
            self._get(number, rank)
        self._forget_before(number)
        return result

    def _receive(self, number: int) -> Any:
        """Return the main process's result of a call, and confirm that it has arrived."""
        result, error = self._get(number, 0)
        self._put(number, None)
        if error:
            raise OtherProcessError(f"process 0 of {self.world} has failed ({error})")
        return result

    def leave(self) -> None:
        """Record that this process ends, and stop its heartbeat. Runs at every exit."""
        atexit.unregister(self.leave)
        self._is_over.set()
        # A thread that is inside the store's code while the interpreter ends would crash it.
        self._heart.join(timeout=BEAT_S)
        # If the store is gone, nobody waits any more.
        with suppress(RuntimeError):
            self.store.set(_end_key(self.rank), "")

    def farewell(self) -> None:
        """Leave without an error. The main process, which may hold the store, leaves last."""
        self.leave()
        if self.rank == 0:
            end_keys = [_end_key(rank) for rank in range(self.world)]
            with suppress(RuntimeError):
                wait_for_keys(self.store, end_keys, FAREWELL_S)

    def _beat(self, store: Store) -> None:
        for count in itertools.count():
            try:
                store.set(_heartbeat_key(self.rank), str(count))
            except RuntimeError:
                # The process that holds the store has ended.
                return
            if self._is_over.wait(BEAT_S):
                return

    def _put(self, number: int, value: object) -> None:
        # Tensors and errors travel too, so JSON is not enough.
        data = pickle.dumps(value)
        n_parts = 0
        for begin in range(0, len(data), CHUNK):
            self._set(number, _key(number, self.rank, n_parts), data[begin : begin + CHUNK])
            n_parts += 1
        # The key that the others look for comes last: when they see it, the parts are there.
        self._set(number, _key(number, self.rank), str(n_parts))

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
        heartbeat = b""
        changed = time.monotonic()
        pause = FIRST_PAUSE_S
        while not self.store.check([key]):
            time.sleep(pause)
            pause = _longer(pause)
            if pause < CAREFUL_PAUSE_S:
                continue
            # It may have set the key just before it ended.
            if self.store.check([_end_key(rank)]) and not self.store.check([key]):
                raise OtherProcessError(
                    f"process {rank} of {self.world} has ended; see its own output for the reason."
                )
            latest = self._heartbeat(rank)
            if latest != heartbeat:
                heartbeat = latest
                changed = time.monotonic()
            elif time.monotonic() - changed > SILENCE_S:
                raise OtherProcessError(
                    f"process {rank} of {self.world} has given no sign of life for {SILENCE_S:g} "
                    "seconds; see its own output for the reason, and run the same command again."
                )

    def _heartbeat(self, rank: int) -> bytes:
        key = _heartbeat_key(rank)
        # Reading a key that is missing would wait for it.
        if not self.store.check([key]):
            return b""
        return self.store.get(key)

    def _forget_before(self, number: int) -> None:
        """Remove this process's values of earlier calls, which all have read, from the store."""
        # Whoever has come to this call has read the values of all calls before.
        remaining: list[tuple[int, str]] = []
        with _connected():
            for call, key in self._own_keys:
                if call < number:
                    self.store.delete_key(key)
                else:
                    remaining.append((call, key))
        self._own_keys = remaining


_open: Exchange | None = None


def open_exchange(rank: int, world: int) -> Exchange:
    """Return the exchange of this process, which must be connected; the first call makes it."""
    global _open
    if _open is None:
        from torch.distributed import distributed_c10d

        _open = Exchange(distributed_c10d._get_default_store(), rank, world)
    return _open


def close_exchange() -> None:
    """Leave the exchange of this process, if there is one."""
    global _open
    if _open is not None:
        _open.farewell()
        _open = None


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def wait_for_keys(store: Store, keys: Iterable[str], patience: float) -> list[str]:
    """Wait at most ``patience`` seconds for keys in the store; return those that are not there."""
    end = time.monotonic() + patience
    pause = FIRST_PAUSE_S
    missing = [key for key in keys if not store.check([key])]
    while missing and time.monotonic() <= end:
        time.sleep(pause)
        pause = _longer(pause)
        missing = [key for key in missing if not store.check([key])]
    return missing


def _longer(pause: float) -> float:
    return min(PAUSE_GROWTH * pause, LONGEST_PAUSE_S)


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


def _end_key(rank: int) -> str:
    return _key("end", rank)


def _heartbeat_key(rank: int) -> str:
    return _key("alive", rank)
