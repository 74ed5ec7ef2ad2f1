"""Test-wide settings: on a machine without a GPU every Triton kernel runs under its
interpreter."""

import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported anywhere
    from tests.support.interpreter import drop_unread_checks, patch_language_once

    patch_language_once()
    drop_unread_checks()

# Tracing and interpreting make objects by the million, few of them in cycles: look for these less
# often.
gc.set_threshold(50_000, 20, 100)
