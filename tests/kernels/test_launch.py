"""Named launches: arguments and kernels that disagree are refused, and the key under which kernels
are kept compiled tells apart what Triton compiles apart, and nothing else.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.activations import Activation
from moe_ops.kernels import launch
from moe_ops.kernels.activation import activated
from moe_ops.kernels.configs import GemmConfig, LayerConfig
from moe_ops.kernels.gemm import sm80_mma, sm90_tma
from moe_ops.kernels.gemm.operands import NO_BIAS, Weight, scaling_of
from moe_ops.kernels.launch import (
    Address,
    Constant,
    Descriptor,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    RuntimeFloat,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.place.routing import (
    NO_ROUTER_WEIGHTS,
    route_pairs,
)
from moe_ops.kernels.rows.scales import Input

PACKAGE = Path(launch.__file__).resolve().parents[1]
H200 = Gpu(227 * 1024, True, True, "NVIDIA H200")

# --- arguments ----------------------------------------------------------------


class Operand(NamedTuple):
    ptr: Pointer
    stride_m: Specialized
    scale: Pointer = None


@unprefixed
class Sizes(NamedTuple):
    M: Runtime
    BLOCK_M: Constant


@arguments
class Example:
    y: Pointer
    x: Operand
    w: Descriptor
    sizes: Sizes
    alpha: RuntimeFloat
    K: Specialized
    PDL: Constant


NAMES = ("y_ptr", "x_ptr", "x_stride_m", "x_scale_ptr", "w", "M", "BLOCK_M", "alpha", "K", "PDL")


def example(
    y_ptr, x_ptr, x_stride_m, x_scale_ptr, w, M, BLOCK_M: tl.constexpr, alpha, K,
    PDL: tl.constexpr,
):  # fmt: skip
    pass


def test_groups_flatten_with_their_names():
    assert Example.names == NAMES
    roles = "pointer pointer specialized pointer descriptor runtime constant runtime specialized"
    assert Example.roles == (*roles.split(), "constant")
    values = dict(y=1, x=Operand(2, 3), w=4, sizes=Sizes(5, 6), alpha=7.0, K=8, PDL=9)
    assert Example(**values) == (1, 2, 3, None, 4, 5, 6, 7.0, 8, 9)
    named = Launch(kernel(Example)(example), (1, 1, 1), Example(**values)).named()
    assert named == dict(zip(NAMES, Example(**values), strict=True))


def test_arguments_must_be_complete_and_by_keyword():
    values = dict(y=1, x=Operand(2, 3), w=4, sizes=Sizes(5, 6), alpha=7.0, K=8)
    for wrong in (values, {**values, "PDL": 9, "other": 10}):
        with pytest.raises(TypeError):
            Example(**wrong)
    with pytest.raises(TypeError):
        Example(*values.values(), 9)


def test_arguments_that_are_no_kernels_are_refused():
    with pytest.raises(TypeError, match="each parameter once"):

        @arguments
        class _Twice:
            x: Operand
            x_ptr: Pointer

    with pytest.raises(TypeError, match="annotated with a role or a NamedTuple"):

        @arguments
        class _Plain:
            K: int

    with pytest.raises(TypeError, match="one of pointer, .* got 'size'"):

        @arguments
        class _Role:
            K: Annotated[int, "size"]


@arguments
class Small:
    y: Pointer
    K: Specialized
    BLOCK: Constant


def swapped(K, y_ptr, BLOCK: tl.constexpr):
    pass


def shorter(y_ptr, K):
    pass


def longer(y_ptr, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pass


def renamed(y_ptr, N, BLOCK: tl.constexpr):
    pass


def not_constant(y_ptr, K, BLOCK):
    pass


def constant(y_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    pass


@pytest.mark.parametrize(
    "function, message",
    [
        (swapped, "swapped must have the parameters of Small, .* 0 must be y_ptr, got K"),
        (shorter, "parameter 2 must be BLOCK, got none"),
        (longer, "parameter 3 must be absent, got PDL"),
        (renamed, "parameter 1 must be K, got N"),
        (not_constant, "BLOCK must be tl.constexpr, as Small has it as constant"),
        (constant, "K must not be tl.constexpr, as Small has it as specialized"),
    ],
)
def test_kernels_that_disagree_with_their_arguments_are_refused(function, message):
    with pytest.raises(TypeError, match=message):
        kernel(Small)(function)


# --- the key ------------------------------------------------------------------


def of_gemm1() -> Launch:
    """A launch of a kernel with pointers, numbers and constants."""
    empty = torch.empty
    w = Weight(empty(2, 64, 32), 2048, 32, 1, empty(2, 1, 1), 1, 1, 1)
    ids = torch.zeros(3, 2, dtype=torch.int32)
    return sm80_mma.gemm1(
        Input(empty(192), 0, 32, 1), Input(empty(3, 32), 0, 32, 1), w, NO_BIAS,
        route_pairs(torch.zeros(64, dtype=torch.int32), ids, ids[0], 2, 4, False),
        NO_ROUTER_WEIGHTS, activated(Activation("silu")), scaling_of("", True), "",
        GemmConfig(64, 32, 2, 4), 16, H200,
    )  # fmt: skip


def of_tma_gemm2() -> Launch:
    """A launch of a kernel that takes tensor descriptors."""
    w = Weight(torch.empty(2, 64, 32), 2048, 32, 1)
    ids = torch.zeros(3, 2, dtype=torch.int32)
    routing = route_pairs(torch.zeros(64, dtype=torch.int32), ids, None, 2, 4, False)
    gemm = GemmConfig(64, 32, 2, 4)
    return sm90_tma.gemm2(
        torch.empty(6, 64), Input(torch.empty(192), 0, 32, 1), 6, w, NO_BIAS, routing,
        scaling_of("", True), LayerConfig(gemm, gemm, 64, 64), H200,
    )  # fmt: skip


@arguments
class Read:
    y: Address
    x: Pointer
    K: Specialized


def read(y_ptr, x_ptr, K):
    pass


READ = kernel(Read)(read)


def of_addresses() -> Launch:
    """A launch of a kernel that takes any alignment of a pointer."""
    return Launch(READ, (1, 1, 1), Read(y=torch.empty(4), x=torch.empty(4), K=16))


def tensor(dtype: torch.dtype, aligned: bool) -> torch.Tensor:
    memory = torch.empty(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + (0 if aligned else 8)
    return memory[start : start + 16].view(dtype)


def descriptor(dtype: torch.dtype, rows: int, box: int) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(rows, 64, dtype=dtype), [rows, 64], [64, 1], [box, 32])


# Of each role values that Triton compiles for, one for every class that it makes of them, and for
# Runtime values that it must not tell apart.
TENSORS = [None] + [
    tensor(dtype, aligned)
    for dtype in (torch.float32, torch.bfloat16, torch.int32)
    for aligned in (True, False)
]
DESCRIPTORS = [
    descriptor(dtype, rows, box)
    for dtype in (torch.float32, torch.bfloat16)
    for rows in (128, 96)  # neither sizes nor addresses matter
    for box in (16, 32)
]
VALUES = {
    "pointer": TENSORS,
    "address": TENSORS,
    "descriptor": DESCRIPTORS,
    "specialized": [1, 17, 48, 2**31 + 1, 2**32],
    "constant": ["", "row", 16, True],
}


def triton_key(one: Launch) -> tuple:
    """What Triton itself compiles a launch anew for."""
    _, found, _ = triton_binder(one.kernel.function)(*one.args)
    return tuple(map(str, found))


@functools.cache
def triton_binder(function: object) -> Callable:
    if not isinstance(function, JITFunction):  # under the interpreter
        function = JITFunction(function.fn, **function.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(function.signature, function.params, backend)


def key(one: Launch) -> tuple:
    return launch._specialization([one], 0)


@pytest.mark.parametrize("make", [of_gemm1, of_tma_gemm2, of_addresses])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_keys_differ_where_triton_compiles_anew_and_nowhere_else(make, data):
    """Two launches that differ in a few random arguments, drawn from VALUES."""
    one = make()
    roles = one.kernel.arguments.roles
    places = data.draw(st.lists(st.integers(0, len(roles) - 1), min_size=1, max_size=3))
    args = []
    for _ in range(2):
        changed = list(one.args)
        for place in places:
            role, before = roles[place], one.args[place]
            if role == "runtime":
                changed[place] = type(before)(data.draw(st.sampled_from([1, 16, 17, 2**20])))
            else:
                changed[place] = data.draw(st.sampled_from(VALUES[role]))
        args.append(one._replace(args=tuple(changed)))
    first, second = args
    assert (key(first) == key(second)) == (triton_key(first) == triton_key(second))
    if all(roles[place] == "runtime" for place in places):
        assert key(first) == key(second)


@pytest.mark.parametrize("make", [of_gemm1, of_tma_gemm2, of_addresses])
def test_keys_follow_every_role(make):
    """Each argument alone."""
    one = make()
    names, roles = one.kernel.arguments.names, one.kernel.arguments.roles
    for place, (name, role) in enumerate(zip(names, roles, strict=True)):

        def changed(value, place=place):
            args = list(one.args)
            args[place] = value
            return key(one._replace(args=tuple(args)))

        if role == "runtime":
            assert changed(1) == changed(16) == changed(17) == key(one), name
        elif role == "descriptor":
            assert len({changed(value) for value in VALUES[role]}) == 4, name  # dtypes, boxes
        elif role == "address":
            assert len({changed(value) for value in VALUES[role]}) == 4, name  # dtypes, None
        else:
            found = [changed(value) for value in VALUES[role]]
            assert len(set(found)) == len(found), name


def test_keys_hold_the_device_the_order_and_the_options():
    one, two = of_gemm1(), of_tma_gemm2()
    launches = [[one], [two], [one, two], [two, one], [one, one], [one._replace(num_warps=8)]]
    launches.append([one._replace(maxnreg=128)])
    keys = {launch._specialization(some, 0) for some in launches}
    assert len(keys) == len(launches)
    assert launch._specialization([one], 1) not in keys
    assert launch._specialization([one._replace(grid=(7, 7, 7))], 0) in keys


def test_key_of_a_layout_is_that_layout():
    """Gluon's descriptors have layouts of shared memory, which are part of what is compiled."""

    class WithLayout:
        def __init__(self, layout):
            self.base, self.block_shape, self.layout = torch.empty(8), [16], layout

    one = of_tma_gemm2()
    place = one.kernel.arguments.roles.index("descriptor")
    layouts = [object(), object()]
    keys = set()
    for layout in (*layouts, layouts[0]):
        args = list(one.args)
        args[place] = WithLayout(layout)
        keys.add(key(one._replace(args=tuple(args))))
    assert len(keys) == 2


# --- running ------------------------------------------------------------------


class Started:
    """In place of a jitted function and of what it is compiled to: notes how it is started."""

    __name__ = "started"

    def __init__(self, log: list):
        self.log = log

    def __getitem__(self, grid):
        return lambda *args, **options: self.log.append((grid, args, options)) or self


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    from triton.runtime import driver

    active = mock.Mock()
    active.get_current_stream.return_value = "stream"
    monkeypatch.setattr(driver, "_active", active)


@arguments
class Waiting:
    y: Pointer
    K: Specialized
    PDL: Constant


def one_of(log: list, pdl_first: bool = False, waits: bool = True, **options) -> Launch:
    made = launch.Kernel(Started(log), Waiting if waits else Small, pdl_first)
    y = torch.empty(4)
    args = Waiting(y=y, K=8, PDL=True) if waits else Small(y=y, K=8, BLOCK=16)
    return Launch(made, (3, 1, 1), args, **options)


def test_kernels_are_compiled_once_and_started_as_compiled_after_that(compiled):
    log: list = []
    launches = [one_of(log), one_of(log, num_warps=8, maxnreg=64)]
    launch.run(launches, -1, H200)
    assert [options for *_, options in log] == [
        {"num_warps": 4, "enable_fp_fusion": True},
        {"num_warps": 8, "maxnreg": 64, "launch_pdl": True, "enable_fp_fusion": True},
    ]
    log.clear()
    again = [one._replace(grid=(5, 1, 1)) for one in launches]
    launch.run(again, -1, H200)
    assert [(grid, options) for grid, _, options in log] == [((5, 1, 1), {"stream": "stream"})] * 2
    assert all(args is not None and len(args) == 3 for _, args, _ in log)


@pytest.mark.parametrize("pdl_first", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
def test_first_kernels_are_launched_early_where_they_wait(compiled, pdl, pdl_first):
    log: list = []
    launch.run([one_of(log, pdl_first), one_of(log)], -1, H200._replace(pdl=pdl))
    early = [options.get("launch_pdl", False) for *_, options in log]
    assert early == [pdl and pdl_first, pdl]


def test_kernels_that_do_not_wait_are_not_launched_early(compiled):
    """They would read what the kernel before them has not written yet."""
    log: list = []
    launch.run([one_of(log, waits=False), one_of(log, True, waits=False)], -1, H200)
    assert [options.get("launch_pdl", False) for *_, options in log] == [False, False]


def test_capture_of_what_was_never_run_is_refused(compiled, monkeypatch):
    log: list = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no compiled kernel for this call .* warm up first"):
        launch.run([one_of(log)], 0, H200)
    assert not log


def test_lazy_functions_are_imported_at_their_first_call():
    lazy = launch.Lazy("moe_ops.kernels.configs:block_bound")
    assert lazy.function is None
    assert lazy(10, 2, 4) == lazy.resolve()(10, 2, 4) == 4
    assert lazy.function is lazy.resolve()
    with pytest.raises(ModuleNotFoundError):
        launch.Lazy("moe_ops.kernels.nowhere:block_bound")()


def kernels_of_the_package():
    """(path, definition, the decorator's keywords) of every kernel."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    name = decorator.func if isinstance(decorator, ast.Call) else None
                    if isinstance(name, ast.Name) and name.id == "kernel":
                        yield path, node, {k.arg: k.value for k in decorator.keywords}


@pytest.mark.slow
def test_first_kernels_wait_before_anything_else():
    """Their predecessor, whatever it is, may still write their inputs, and read the workspaces."""
    found = []
    for path, node, options in kernels_of_the_package():
        if not isinstance(options.get("pdl_first"), ast.Constant):
            continue
        found.append(node.name)
        lines = path.read_text().split("\n")[node.body[1].lineno - 1 : node.end_lineno]
        body = "\n".join(lines)  # behind the docstring
        before = body[: body.index("gdc_wait(PDL)")]
        for word in ("load(", "store(", "gdc_launch_dependents(", "expert(", "position("):
            assert word not in before, (node.name, word)
    expected = [
        "moe_ops_admit_experts",
        "moe_ops_gemv1",
        "moe_ops_permute_tokens",
        "moe_ops_quantize",
        "moe_ops_route",
    ]
    assert sorted(found) == expected


# functions that execute gdc_wait for the kernel that calls them
WAITING = ("gdc_wait(", "run_tiles(", "token_products(", "quantize_rows(", "scatter_rows(")


@pytest.mark.slow
def test_kernels_say_whether_they_wait():
    """A kernel that is launched early, and does not wait, reads what is not written yet."""
    seen = 0
    for path, node, options in kernels_of_the_package():
        names = [argument.arg for argument in node.args.args]
        if "PDL" not in names:
            continue
        body = "\n".join(path.read_text().split("\n")[node.body[0].lineno - 1 : node.end_lineno])
        says = getattr(options.get("waits"), "value", True)
        seen += 1
        assert any(word in body for word in WAITING) == says, node.name
    assert seen > 20


@pytest.mark.slow
def test_inspected_kernels_are_where_they_are_said_to_be():
    """`kernels_of_the_package` finds those that this file launches."""
    names = {node.name for _, node, _ in kernels_of_the_package()}
    for one in (of_gemm1(), of_tma_gemm2()):
        assert one.kernel.name in names
        assert inspect.getsourcefile(one.kernel.function.fn).startswith(str(PACKAGE))
