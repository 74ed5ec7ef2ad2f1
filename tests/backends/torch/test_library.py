"""The library of the CPU kernels is of this version: tests of kernels that do not load skip."""

import ctypes

import pytest

from moe_ops.backends.torch import cpu, layer

pytestmark = pytest.mark.skipif(not cpu._LIBRARY.exists(), reason="not built")


def test_it_has_what_this_version_calls():
    assert cpu.library() is not None, "installing again builds it anew"


def test_structs_are_those_of_the_kernels():
    library = ctypes.CDLL(str(cpu._LIBRARY))
    of_structs = ctypes.sizeof(layer.Experts) + layer.CALL.size
    assert library.moe_ops_cpu_experts_struct_bytes() == of_structs
