"""The program: ``hybrid-distill``, ``python -m hybrid_distill``, ``accelerate launch -m hybrid_distill run RECIPE``.

Importing the libraries takes seconds, in which Ctrl-C ends the program as it does later: in one line.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Import what the commands need, then run the one that was asked for."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as in the background
        signal.signal(signal.SIGINT, _end)
    from .cli.app import main as run_command

    signal.signal(signal.SIGINT, before)
    run_command()


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: an exception out of the middle of an import would be swallowed, or printed, by any library."""
    os.write(2, b"stopped; nothing was begun.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
