"""Command line, and its entry point for recipes.

A program starts here, so importing this prepares the process: it is the one part of the package
whose import changes anything. It loads no library, and an unsupported machine exits here.
"""

import os
import sys

from ..provenance import check_supported, mute_imports

SHORT_SPIN = "1000"


def prepare_process() -> None:
    """Set how long torch's threads wait for each other, and mute warnings of imports.

    Both must happen before torch is imported, and a recipe imports it right after this package.
    Variables that the user has set stay.
    """
    # libgomp's threads spin at every barrier until the last one arrives. If another process keeps a core busy, a step
    # on two threads takes longer than on one; threads that soon fall asleep cost little on an idle machine
    # (benchmarks/threads.py).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SHORT_SPIN)
    mute_imports()


def exit_if_unsupported() -> None:
    """Exit with one line on a machine that cannot run this; note versions that were not tried.

    Before any other import: those would fail there with a traceback.
    """
    try:
        note = check_supported()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if note is not None:
        print(f"note: {note}", file=sys.stderr)


prepare_process()
exit_if_unsupported()

from .app import main, run_recipe  # noqa: E402  after the process is prepared
