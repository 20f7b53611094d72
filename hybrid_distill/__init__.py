"""Turn pretrained Transformers into Transformer-SSM hybrids that keep attention only where it is needed."""

import os
from pathlib import Path


def _is_busy() -> bool:
    """Return whether other processes kept a core busy for the last minute and still do (Linux: proc(5), loadavg)."""
    try:
        last_minute, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    except (OSError, ValueError):
        return False
    return float(last_minute) > 0.7 and int(running.split("/")[0]) > 1


# torch's OpenMP threads (libgomp) spin at every barrier until the last one arrives. Beside another busy process that
# one waits for a core, and training is ten times slower than on one thread: sleeping threads are the fastest there,
# and threads that spin shortly on an idle machine (benchmarks/threads.py). libgomp reads this once, in `import torch`.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ.update({"OMP_WAIT_POLICY": "passive"} if _is_busy() else {"GOMP_SPINCOUNT": "1000"})
