"""Turn pretrained Transformers into Transformer-SSM hybrids that keep attention only where it is needed."""

import os

# torch's OpenMP threads (libgomp) spin at every barrier until the last one arrives. Beside another busy process that
# one waits for a core, and training is ten times slower than on one thread. A short spin costs little on an idle
# machine (benchmarks/threads.py). libgomp reads the variable once, when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
