"""Test-wide settings: on a machine without a GPU every Triton kernel runs under its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported anywhere
    from tests.interpreter import drop_unread_checks, patch_language_once

    patch_language_once()
    drop_unread_checks()
