"""Adapters of experts against fp64 autograd through the oracle with adapted weights, in plain
torch and through the kernels: under Triton's interpreter, or on a GPU."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import LoRA
from moe_ops.autograd import training
from moe_ops.backends.torch import grouped_mm as products
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.ops.options import Options
from moe_ops.planning import training as planning
from tests.autograd.conftest import on_gpu
from tests.autograd.test_gradients import (
    TOLERANCE,
    call,
    check_captured_step,
    cotangent,
    leaves,
)
from tests.support import oracle
from tests.support.cases import BF16, FP32, FP64, Case, Largest, poisoned_memory

MATRICES = ("a13", "b13", "a2", "b2")


def adapter(case: Case, ranks=(4, 3), scale=0.7, seed=0, dtype=None) -> LoRA:
    """Random matrices, whose products are as large as the weights."""
    g = torch.Generator().manual_seed(seed + 1)
    E, N, K = oracle.weight(case.args[1]).shape
    I = oracle.weight(case.args[2]).shape[2]
    r, q = ranks

    def random(rows, columns):
        t = torch.randn(E, rows, columns, generator=g) * columns**-0.5
        return t.to(dtype or case.dtype).to(case.device).requires_grad_()

    both = ((r, K), (N, r), (q, I), (K, q))
    return LoRA(*[random(*size) for size in both], scale)


def expected(case: Case, adapters: list[LoRA], only=None) -> tuple[torch.Tensor, dict]:
    """The layer with weights to which the adapters' products are added, and its gradients."""
    given = leaves(case, FP64, only)
    wide = [
        LoRA(*[None if t is None else t.detach().double().requires_grad_() for t in one[:4]],
             one.scale)
        for one in adapters
    ]  # fmt: skip
    w13, w2 = [given.get(name, case.args[i]) for name, i in (("w13", 1), ("w2", 2))]
    weight = oracle.weight

    def adapted(w):
        total = weight(w)
        for one in wide:
            a, b = one[:2] if w is w13 else one[2:4]
            total = total if a is None else total + one.scale * torch.bmm(b, a)
        return total

    named = {"w13": w13, "w2": w2} | given
    with mock.patch.object(oracle, "weight", adapted):
        out = call(oracle.experts, case, named)
    leaf = dict(given) | trained(wide)
    grads = torch.autograd.grad(out, list(leaf.values()), cotangent(case).double())
    return out, dict(zip(leaf, grads, strict=True))


def trained(adapters: list[LoRA]) -> dict:
    return {
        f"{name}[{i}]": t
        for i, one in enumerate(adapters)
        for name, t in zip(MATRICES, one[:4], strict=True)
        if t is not None and t.requires_grad
    }


def run(case: Case, adapters: list[LoRA], function=moe_ops.fused_experts, only=None, **options):
    """The result and its gradients."""
    given = leaves(case, only=only)
    one = adapters[0] if len(adapters) == 1 else adapters
    out = call(function, case, given, adapters=one, **options)
    leaf = given | trained(adapters)
    grads = torch.autograd.grad(out, list(leaf.values()), cotangent(case))
    return out, dict(zip(leaf, grads, strict=True))


def check(case: Case, adapters=None, function=moe_ops.fused_experts, only=None, within=0.0):
    adapters = [adapter(case)] if adapters is None else adapters
    with poisoned_memory():
        out, grads = run(case, adapters, function, only)
    want, wanted = expected(case, adapters, only)
    allowed = max(within, TOLERANCE[case.dtype])
    assert out.dtype == case.dtype and oracle.relative_error(out, want) <= allowed
    assert (out[case.nowhere] == 0).all()
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        # of router weights: products of a row with a rounded one cancel
        error, most = oracle.relative_error(grad, wanted[name]), allowed * (1 + ("topk" in name))
        assert error <= max(most, TOLERANCE[grad.dtype]), (
            f"{name}: {error:.2e}, allowed {most:.2e}"
        )
    return grads


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "gelu_tanh", "relu2_no_mul"])
def test_every_kind_of_activation(where, activation):
    check(Case(*where, activation=activation, top_k=3))


@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "M": 20, "E": 6},
        {"M": 1, "top_k": 4, "seed": 1},
        {"M": 37, "ids_dtype": torch.int64, "weights_dtype": BF16},
        {"M": 5, "E": 40, "top_k": 1},  # most experts have no rows
        {"M": 300, "E": 2, "top_k": 2, "K": 16, "I": 8},  # more rows of an expert than a block
        {"M": 9, "K": 200, "I": 136},  # more than one tile of columns, the last not whole
        {"bias": True, "expert_map": True},
        {"bias": True, "on_input": True, "top_k": 1, "expert_map": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(where, options):
    check(Case(*where, **options))


@pytest.mark.parametrize("ranks", [(1, 2), (16, 8), (17, 70), (70, 130)], ids=str)
def test_every_rank(where, ranks):
    case = Case(*where, M=12)
    check(case, [adapter(case, ranks)])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_odd_sizes(dtype):
    check(Case("cpu", dtype, K=33, I=17))


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_transposed_views(where, on_input, recompute):
    case = Case(*where, M=9, on_input=on_input, top_k=1 if on_input else 2)
    for i in (1, 2):
        case.args[i] = case.args[i].mT.contiguous().mT
    check(case, function=partial(moe_ops.fused_experts, recompute=recompute))


@pytest.mark.parametrize("scheme", ["fp8_block", "int8_w8a8"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_quantized_activations(scheme, dtype):
    """The adapters see the activations that the quantized weights see; these get no gradient."""
    case = Case("cpu", dtype, scheme=scheme, K=160, I=136, bias=True)
    grads = check(case, within=TOLERANCE[dtype] + 2e-3)
    assert not {"w13", "w2"} & set(grads)


@pytest.mark.parametrize(
    "scheme", ["int4_w4a16:g32", "int4_w4a16:channel:zp", "mxfp4_w4a16", "nf4_w4a16:g32"]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_weights(where, scheme, recompute):
    """They get no gradient."""
    case = Case(*where, scheme=scheme, K=160, I=136, bias=True)
    function = partial(moe_ops.fused_experts, recompute=recompute)
    ranks = (70, 33) if recompute else (4, 3)  # the first more than a kernel adds at a time
    grads = check(case, [adapter(case, ranks)], function=function)
    assert not {"w13", "w2"} & set(grads)


def test_one_weight_adapted(where):
    case = Case(*where)
    both = adapter(case)
    for one in (both._replace(a2=None, b2=None), both._replace(a13=None, b13=None)):
        grads = check(case, [one])
        assert len(grads) == 6
    assert len(check(case, [both._replace(a13=None, b13=None, a2=None, b2=None)])) == 4


def test_several_adapters(where):
    """Of other ranks, scales and weights: their products add up."""
    case = Case(*where)
    first, second = adapter(case), adapter(case, (6, 5), -1.3, seed=3)
    third = adapter(case, (2, 2), 0.4, seed=5)._replace(a13=None, b13=None)
    check(case, [first, second, third])


@pytest.mark.parametrize(
    "only", [[], ["hidden_states"], ["topk_weights"], ["w13"], ["w2"], ["hidden_states", "w2"]]
)
@pytest.mark.parametrize("adapters", ["trained", "frozen", "a13"])
def test_some_gradients_alone(where, only, adapters):
    case = Case(*where)
    one = adapter(case)
    for name in MATRICES:
        getattr(one, name).requires_grad_(adapters == "trained" or name == adapters)
    if only or adapters != "frozen":
        grads = check(case, [one], only=only)
        assert len(grads) == len(only) + {"trained": 4, "frozen": 0, "a13": 1}[adapters]


@pytest.mark.parametrize("path", ["plain", "kernels"])
def test_nothing_goes_back_through_w2_for_its_own_gradients(path, monkeypatch):
    """Those of w2, its bias and its adapter need no product with it."""
    if path == "plain":
        monkeypatch.setattr(planning, "why_not_kernels", lambda *_: "the test says so")
    case = Case("cpu", FP32, bias=True)
    one = adapter(case)._replace(a13=None, b13=None)
    passed, multiply = [], products.grouped_mm

    def noted(x, weight, *rest, transpose=False, **options):
        passed.append(transpose and weight.shape == case.args[2].shape)
        return multiply(x, weight, *rest, transpose=transpose, **options)

    monkeypatch.setattr(planning, "PORTABLE", products.PORTABLE._replace(multiply=noted))
    for only, expected in ((["w2", "w2_bias"], False), (["w2", "topk_weights"], True)):
        passed.clear()
        check(case, [one], only=only)
        assert any(passed) == expected


def test_bitwise_repeatable_and_recomputed(where):
    case = Case(*where, M=40, top_k=4)
    one = [adapter(case)]
    (out, first), (_, second) = run(case, one), run(case, one)
    again_out, again = run(case, one, recompute=True)
    with torch.no_grad():
        inferred = moe_ops.fused_experts(*case.args, **case.options, adapters=one)
    assert torch.equal(out, again_out) and torch.equal(out, inferred)
    for name in first:
        assert torch.equal(first[name], second[name]) and torch.equal(first[name], again[name])


def test_strided_arguments(where):
    """Rows and columns of tokens and of the output's gradient; matrices as peft packs them."""
    case = Case(*where, M=11)
    one = adapter(case)
    _, wanted = run(case, [one])
    wide = torch.full((11, 2 * 48 + 3), math.nan, dtype=case.dtype, device=case.device)
    wide[:, 3::2] = case.args[0]
    wide.requires_grad_()
    packed = [t.detach().permute(1, 2, 0).contiguous().requires_grad_() for t in one[:4]]
    strided = LoRA(*[t.permute(2, 0, 1) for t in packed], one.scale)
    out = call(moe_ops.fused_experts, case, {"hidden_states": wide[:, 3::2]}, adapters=strided)
    grad = cotangent(case).T.contiguous().T
    dx, *found = torch.autograd.grad(out, [wide, *packed], grad)
    assert torch.equal(dx[:, 3::2], wanted["hidden_states"])
    for name, t in zip(MATRICES, found, strict=True):
        assert torch.equal(t.permute(2, 0, 1), wanted[f"{name}[0]"])


def test_experts_without_rows_get_zeros(where):
    ids = torch.tensor([[-1, 9], [2, 2], [9, 0], [0, -7]])
    case = Case(*where, M=4, top_k=2, ids=ids)
    grads = check(case)
    for name in MATRICES:
        found = grads[f"{name}[0]"]
        assert (found[[1, 3]] == 0).all() and found[[0, 2]].any()
    nowhere = torch.full((5, 2), 11, dtype=torch.int32)
    case = Case(*where, M=5, top_k=2, ids=nowhere)
    assert all((grad == 0).all() for grad in run(case, [adapter(case)])[1].values())


def test_no_tokens():
    case = Case(M=0)
    assert all((grad == 0).all() for grad in run(case, [adapter(case)])[1].values())


def test_matrices_of_another_dtype():
    """Kept in fp32 beside bf16 weights: computed in bf16, with gradients in fp32."""
    case = Case(dtype=BF16)
    one = adapter(case, dtype=FP32)
    grads = check(case, [one], within=6 * 2.0**-8)
    assert all(grads[f"{name}[0]"].dtype == FP32 for name in MATRICES)


def test_autocast():
    case = Case(dtype=FP32, bias=True)
    one = adapter(case)
    with torch.autocast("cpu", BF16):
        out = call(moe_ops.fused_experts, case, leaves(case), adapters=one)
    by_hand = {k: t.to(BF16) for k, t in leaves(case).items() if k != "topk_weights"}
    want = call(moe_ops.fused_experts, case, by_hand, adapters=one)
    assert out.dtype == BF16 and torch.equal(out, want)
    for a, b in zip(*[torch.autograd.grad(y.sum(), one[:4]) for y in (out, want)], strict=True):
        assert a.dtype == FP32 and torch.equal(a, b)


# --- derivatives of derivatives ------------------------------------------------------------------


def wide_case() -> tuple[Case, dict, LoRA]:
    case = Case(dtype=FP64, bias=True, M=4, E=3, K=5, I=3, activation="gelu")
    case.args[3] = case.args[3].double()
    for t in (case.args[0], case.args[3]):
        t.nan_to_num_()
    return case, leaves(case), adapter(case, (2, 1))


def test_gradcheck():
    case, given, one = wide_case()

    def function(*values):
        named = dict(zip(given, values, strict=False))
        return call(
            moe_ops.fused_experts, case, named, adapters=LoRA(*values[len(given) :], one.scale)
        )

    assert torch.autograd.gradcheck(function, (*given.values(), *one[:4]))


@pytest.mark.slow
def test_second_derivatives():
    case, given, one = wide_case()

    def function(*values):
        named = {"hidden_states": values[0], "topk_weights": values[1]}
        return call(moe_ops.fused_experts, case, named, adapters=LoRA(*values[2:], one.scale))

    inputs = (given["hidden_states"], given["topk_weights"], *one[:4])
    assert torch.autograd.gradgradcheck(function, inputs)


# --- what is kept and allocated ------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept(where, recompute):
    case = Case(*where, M=7, E=4, top_k=2, I=40)
    given, one, kept = leaves(case), adapter(case), []
    known = {t.data_ptr() for t in (*given.values(), *one[:4], case.args[4])}

    def pack(t):
        if t.data_ptr() not in known and t.numel():
            kept.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(moe_ops.fused_experts, case, given, adapters=one, recompute=recompute)
    products = [] if recompute else [((14, 80), case.dtype), ((14, 4), case.dtype)]
    assert kept == [*products, ((18,), torch.int32)]


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32"])
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_is_as_large_as_a_weight(where, scheme, recompute, monkeypatch):
    """What the operators allocate in a step of frozen weights: no sum of weights and adapters, no
    product of the two matrices of an adapter, no dequantized weight.
    """
    case = Case(*where, scheme, M=3, top_k=2, E=16, K=64, I=32)
    one, recorded = adapter(case), []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "moe_ops":
                recorded.append(args)
            return func(*args, **(kwargs or {}))

    with Record():
        given = leaves(case, only=["hidden_states"])
        out = call(moe_ops.fused_experts, case, given, adapters=one, recompute=recompute)
        out.backward(cotangent(case))
    # what operators do inside is seen by no mode: their functions are called
    forward, backward = recorded
    with torch.no_grad(), Largest() as largest:
        training._forward(*forward)
        training._backward(*backward)
    w13, w2 = [oracle.weight(w).numel() for w in case.args[1:3]]
    assert 0 < largest.elements < min(w13, w2)


def test_flops():
    """As of frozen weights, and for each adapter three times its products; what w2's makes narrow
    is computed again.
    """
    case = Case(M=7, top_k=2, K=48, I=40)
    one = adapter(case, (4, 3))
    S, base = 14, 2 * 14 * 48 * (80 + 40)
    narrow, wide = 2 * S * (4 * 48 + 3 * 40), 2 * S * (4 * 80 + 3 * 48)
    for recompute in (False, True):
        again = recompute * 2 * S * (48 * 80 + 4 * (48 + 80))
        with FlopCounterMode(display=False) as counted:
            run(case, [one], only=["hidden_states"], recompute=recompute)
        forward, backward = base + narrow + wide, base + 2 * (narrow + wide) + 2 * S * 3 * 40
        assert counted.get_total_flops() == forward + backward + again
    one = one._replace(a13=None, b13=None)  # nothing goes back through w2
    with FlopCounterMode(display=False) as counted:
        run(case, [one], only=[])
    assert counted.get_total_flops() == base + 2 * S * 3 * (40 + 48) * 3


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_graph_for_every_number_of_tokens():
    torch._dynamo.reset()
    compiled = torch.compile(
        moe_ops.fused_experts, fullgraph=True, backend="aot_eager", dynamic=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for M in (24, 8, 40, 64):
            check(Case(M=M, K=16, I=8), function=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32"])
def test_inductor(scheme):
    """With several adapters, and without gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True)
    case = Case(scheme=scheme, M=6, bias=True)
    adapters = [adapter(case), adapter(case, (2, 2), 0.3, seed=4)]
    check(case, adapters, compiled)
    with torch.no_grad():
        out = call(compiled, case, {}, adapters=adapters)
    assert oracle.relative_error(out, expected(case, adapters)[0]) < TOLERANCE[FP32]


def test_exported():
    case = Case(M=6)
    one = adapter(case)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, t in zip(MATRICES, one[:4], strict=True):
                setattr(self, name, torch.nn.Parameter(t.detach()))

        def forward(self, x, w13, w2, weights, ids):
            adapters = LoRA(*[getattr(self, name) for name in MATRICES], one.scale)
            return moe_ops.fused_experts(x, w13, w2, weights, ids, adapters=adapters)

    args = (case.args[0].nan_to_num(), *case.args[1:])
    program = torch.export.export(Layer(), args)
    found = [str(n.target) for n in program.graph.nodes if "moe_ops" in str(n.target)]
    assert found == ["moe_ops.lora_experts_forward.default"]
    want, _ = expected(case, [one], [*leaves(case)])
    out = program.module()(*args)
    assert oracle.relative_error(out[~case.nowhere], want[~case.nowhere]) < TOLERANCE[FP32]


# --- which path runs, and what is refused --------------------------------------------------------


def test_no_adapters_take_no_path_of_theirs(monkeypatch):
    monkeypatch.setattr(training, "lora_forward", None)
    case = Case(bias=True)
    assert torch.equal(
        call(moe_ops.fused_experts, case, leaves(case), adapters=None), call(
            moe_ops.fused_experts, case, leaves(case))
    )  # fmt: skip


def test_why_not_kernels():
    case = Case()
    none = [None] * 3
    act = moe_ops.Activation("silu")
    made = ExpertsCall(
        case.args[0].nan_to_num(), Weight(case.args[1]), Weight(case.args[2]),
        *case.args[3:], *none, Options(act, needs_grad=True),
    )  # fmt: skip
    problem = mock.Mock(num_experts=4, num_rows=48, hidden_size=48, intermediate_size=24)
    joined = moe_ops.autograd.adapters.join(adapter(case), problem, made[0])
    matrices = [t for one in joined for t in one[:2]]
    assert planning.why_not_kernels(made, matrices) == planning.why_not_kernels(made)
    half = [matrices[0].half(), *matrices[1:]]
    assert "of another dtype" in planning.why_not_kernels(made, half)


def bad(case, **changes):
    return lambda: call(
        moe_ops.fused_experts, case, {}, adapters=adapter(case)._replace(**changes)
    )


def test_errors():
    case = Case(bias=True)  # E 4, K 48, N 48, I 24, ranks 4 and 3
    zeros = torch.zeros
    for match, wrong in (
        (r"adapters.a13 must have shape \(E, r, K\) = \(4, r, 48\), got \(4, 5, 47\)",
         {"a13": zeros(4, 5, 47)}),
        (r"adapters.b13 must have shape \(E, N, r\) = \(4, 48, 4\), got \(4, 48, 5\)",
         {"b13": zeros(4, 48, 5)}),
        (r"adapters.a2 must have shape \(E, r, I\) = \(4, r, 24\), got \(3, 3, 24\)",
         {"a2": zeros(3, 3, 24)}),
        (r"adapters.b2 must have shape \(E, K, r\) = \(4, 48, 3\), got \(4, 24, 3\)",
         {"b2": zeros(4, 24, 3)}),
        (r"adapters.a13 must have shape \(E, r, K\), got a 2-D tensor", {"a13": zeros(4, 48)}),
        (r"adapters.a2 must have a rank of at least 1", {"a2": zeros(4, 0, 24)}),
        (r"adapters.b13 must be a tensor \(E, N, r\), got None: of a pair", {"b13": None}),
        (r"adapters.b2 must be a torch.Tensor, got list", {"b2": [1.0]}),
        (r"adapters.a13 must have a floating-point dtype of 16 bits or more, got torch.int8",
         {"a13": zeros(4, 4, 48, dtype=torch.int8)}),
        (r"adapters.a13 must have a floating-point dtype of 16 bits or more, got torch.float8",
         {"a13": zeros(4, 4, 48).to(torch.float8_e4m3fn)}),
        (r"adapters.b2 must be on cpu, got meta; move it", {"b2": zeros(4, 48, 3, device="meta")}),
        (r"adapters.scale must be a number, got", {"scale": zeros(())}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            bad(case, **wrong)()
    for match, adapters in (
        ("adapters must be a moe_ops.LoRA or a sequence of them, got dict", {}),
        (r"adapters\[0\] must be a moe_ops.LoRA, got Tensor; name its fields",
         tuple(adapter(case)[:4])),
        (r"adapters\[1\].a13 must have shape",
         [adapter(case), adapter(case)._replace(a13=zeros(4, 4, 1))]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call(moe_ops.fused_experts, case, {}, adapters=adapters)
    with pytest.raises(ValueError, match="backend must be 'auto' or 'torch' for a call with adap"):
        call(moe_ops.fused_experts, case, {}, adapters=adapter(case), backend="triton")
    scaled = {"hidden_states_scale": zeros(7, 1)}
    with pytest.raises(ValueError, match="must not arrive quantized .* where adapters are given"):
        call(moe_ops.fused_experts, case, {}, adapters=adapter(case), **scaled)
    call(moe_ops.fused_experts, case, {}, adapters=adapter(case), backend="torch")


def test_forward_mode_and_transforms_are_refused():
    case = Case()
    one = adapter(case)
    plain = LoRA(*[t.detach() for t in one[:4]], one.scale)

    def function(a13):
        return call(moe_ops.fused_experts, case, {}, adapters=plain._replace(a13=a13))

    with pytest.raises(RuntimeError, match="moe_ops has no forward-mode derivative"):
        torch.func.jvp(function, (plain.a13,), (torch.ones_like(plain.a13),))
    with pytest.raises(RuntimeError, match="cannot be differentiated by torch.func"):
        torch.func.grad(lambda a13: function(a13).sum())(plain.a13)


@on_gpu
def test_a_captured_step_follows_the_routing(where):
    cases = [Case(*where, M=64, E=8, top_k=2, seed=seed) for seed in (0, 1)]
    one = adapter(cases[0])
    check_captured_step(cases, one[:4], adapters=one)
