"""Memory that is kept costs no page faults when it is used again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PAGE = 4096
BLOCK = 2**26
COUNT = f"""
import resource
import torch
from hybrid_distill.train.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory(torch.device("cpu"))
for _ in range(2):
    torch.ones({BLOCK} // 4)
before = faults()
for _ in range(4):
    torch.ones({BLOCK} // 4)
print(faults() - before)
"""


def page_faults(environment: dict[str, str]) -> int:
    """Return the page faults of four blocks that follow others of the same size."""
    process = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, env=environment, check=True
    )
    return int(process.stdout)


@pytest.mark.launched
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_a_freed_block_is_used_again_without_page_faults() -> None:
    unset = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    assert page_faults(unset) < BLOCK // PAGE // 4
    # A user's own setting stays: every block is mapped and cleared anew.
    own = {**unset, "MALLOC_MMAP_THRESHOLD_": "1000000", "THP_MEM_ALLOC_ENABLE": "0"}
    assert page_faults(own) > 3 * BLOCK // PAGE
