"""FlashInfer's modules: versions, builds, and which GPU takes which."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

from moe_ops.backends.flashinfer import backend, library


def test_available_names_the_version(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for version, reason in (
        ("0.6.13", None),
        ("0.6.13.post1", None),
        ("0.6.14", "got 0.6.14; pip install flashinfer-python==0.6.13"),
    ):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, v=version: v)
        answer = backend.available.__wrapped__()
        assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("built", [True, False])
def test_a_module_that_is_not_built_is_announced(built, monkeypatch):
    """Before it is built, which takes long."""
    told, loaded = [], mock.MagicMock()

    def build_and_load():
        told.append("built")
        return loaded

    spec = mock.MagicMock(is_compiled=built, build_and_load=build_and_load)
    package = mock.MagicMock()
    package.jit.fused_moe.gen_cutlass_fused_moe_sm90_module.return_value = spec
    package.jit.env.FLASHINFER_CSRC_DIR = Path("/there")
    names = {"": package, ".jit": package.jit, ".jit.fused_moe": package.jit.fused_moe}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert library.module.__wrapped__("90") is loaded
    texts = [str(w.message) for w in caught]
    assert told == ["built"]
    assert [("24 minutes" in t and "moe_ops.warmup" in t) for t in texts] == (
        [] if built else [True]
    )
    loaded.set_deepgemm_jit_include_dirs.assert_called_once_with(
        ["/there/nv_internal/tensorrt_llm"]
    )


@pytest.mark.parametrize(
    "capability, name",
    [((9, 0), "90"), ((10, 0), "100"), ((10, 3), "103"), ((12, 1), "120"), ((8, 9), "")],
)
def test_modules_of_gpus(capability, name):
    assert library.architecture(capability) == name
