"""The command line, and what recipes call. Importing it loads no library, and ends on an unsupported machine."""

import sys

from ..provenance import check_supported

try:
    if _note := check_supported():
        print(f"note: {_note}", file=sys.stderr)
except ValueError as error:  # before anything is imported that would fail there with a traceback
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

from .app import main, run_recipe
