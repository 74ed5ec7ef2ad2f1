"""The library of the CPU kernels is of this version: tests of kernels that do not load skip."""

import ctypes
import warnings
from types import SimpleNamespace

import pytest

from moe_ops.backends.torch import cpu, layer
from moe_ops.csrc import build

pytestmark = pytest.mark.skipif(not cpu._LIBRARY.exists(), reason="not built")


def test_it_has_what_this_version_calls():
    assert cpu.library() is not None, "installing again builds it anew"


def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path):
    """As an editable installation has it after a pull, or one whose files were replaced."""
    monkeypatch.setattr(cpu, "_LIBRARY", tmp_path / "moe_ops" / "cpu_grouped_mm.so")
    monkeypatch.setattr(cpu, "_kernels", dict)
    cpu._LIBRARY.parent.mkdir()
    cpu._LIBRARY.touch()

    def load(says):
        built = SimpleNamespace()
        if says is not None:
            built.moe_ops_cpu_sources = lambda: says.encode()
        monkeypatch.setattr(cpu.ctypes, "CDLL", lambda path: built)
        return cpu.library.__wrapped__() is built

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(build.cpu_fingerprint()) and load("")  # or built by hand
    for says in ("0123456789abcdef", None):
        with pytest.warns(UserWarning, match="other sources than these; install this version"):
            assert not load(says)
    (tmp_path / "hatch_build.py").touch()
    with pytest.warns(UserWarning, match=f"run python {tmp_path / 'hatch_build.py'}"):
        assert not load(None)
    assert cpu.why_not().startswith("not used: it was built from other sources")
    monkeypatch.setattr(build, "CPU_SOURCES", tmp_path / "none")  # a package without them
    assert build.cpu_fingerprint() == "" and load("0123456789abcdef")


def test_structs_are_those_of_the_kernels():
    library = ctypes.CDLL(str(cpu._LIBRARY))
    of_structs = ctypes.sizeof(layer.Experts) + layer.CALL.size
    assert library.moe_ops_cpu_experts_struct_bytes() == of_structs
