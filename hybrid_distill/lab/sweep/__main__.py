"""``python -m hybrid_distill.lab.sweep OUT TASK``: one task of a sweep, in one process or several."""

import logging
import signal
import sys
from pathlib import Path

from ...distributed import disconnect, is_launched_main
from ...train.stop import Interrupted
from .cells import perform
from .folder import Sweep


def main(out: str, task: str) -> None:
    """Run a task; its outcome is written to the sweep's folder."""
    logging.basicConfig(
        level=logging.INFO if is_launched_main() else logging.ERROR, format="%(message)s"
    )
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    sweep = Sweep(Path(out))
    try:
        perform(sweep, sweep.tasks[task])
        disconnect()
    except (Interrupted, KeyboardInterrupt):
        # Its state is saved. Without an outcome, the next start of the sweep resumes it.
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
