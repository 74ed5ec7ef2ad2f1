"""Whether kernels run in Triton's interpreter, as kernels ask. Imported at first launch only."""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
