"""Command line, and its entry point for recipes. Importing it loads no library; an unsupported machine exits here."""

import sys

from ..provenance import check_supported

try:
    if _note := check_supported():
        print(f"note: {_note}", file=sys.stderr)
except ValueError as error:  # before an import fails there with a traceback
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

from .app import main, run_recipe
