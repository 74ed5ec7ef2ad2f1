"""Where this library keeps on disk what it found out about a machine.

Triton, DeepGEMM and FlashInfer have caches of their own for what they compile; docs/backends.md names them.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MOE_OPS_CACHE"


def folder() -> Path:
    """The folder named by MOE_OPS_CACHE, else ~/.cache/moe_ops. Whoever writes makes it."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "moe_ops")
