"""An emulator of the PTX that triton emits for sm_80 and sm_90: one program at a time, a numpy lane
for each thread.

`text` parses, `control_flow` finds the basic blocks, `translation` makes each a Python function,
which calls `arithmetic` and the collective instructions of `cta`; `Program` executes a grid.
Besides the arithmetic it models what a compiled kernel can get wrong without an error message:

- every access to global memory lies inside an argument, every one to shared memory inside what was
  allocated;
- two warps meet at a barrier between a write and another access of the same bytes (`Memory`);
- `cp.async` delivers at its wait and not before; until then nobody reads or writes its bytes;
- `wgmma` reads shared memory until its wait, of what was stored only what a proxy fence has
  published; its sums are NaN until then;
- registers and shared memory hold junk before the first write.

Lanes of one warp count as ordered. What ptxas makes of the PTX is not checked, nor is the
approximation of exp2."""

from .memory import Fault, Memory
from .program import Program
