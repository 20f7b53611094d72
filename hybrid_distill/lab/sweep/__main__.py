"""``python -m hybrid_distill.lab.sweep OUT TASK``: one task of a sweep, in a process of its own or in several."""

import logging
import signal
import sys
from pathlib import Path

from ...distributed import disconnect, is_launched_main
from ...train.loop import Interrupted
from .cells import perform
from .record import Sweep


def main(out: str, task: str) -> int:
    """Exit status: 0 done or saved, 1 failed."""
    logging.basicConfig(level=logging.INFO if is_launched_main() else logging.ERROR, format="%(message)s")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    sweep = Sweep(Path(out))
    try:
        outcome = perform(sweep, sweep.tasks[task])
    except (Interrupted, KeyboardInterrupt):
        return 0
    disconnect()
    return int(outcome.state == "failed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
