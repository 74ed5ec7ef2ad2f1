"""nvfp4, mxfp4 and mxfp8 for SM100 and SM120: the kernels around the GEMMs under Triton's
interpreter, and GEMMs in plain torch that read what these wrote. Not run on hardware.
"""

from __future__ import annotations

import re

import pytest
import torch

import moe_ops
from moe_ops import numerics
from moe_ops.backends.cutlass import backend, schemes
from moe_ops.csrc import build
from moe_ops.ops.problem import Machine, Problem
from tests.backends.cutlass.test_layer import case_of, check, forget
from tests.support import fake_cutlass
from tests.support.cases import BF16, FP16, Case, garbage, with_global_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulated on a CPU")
all_schemes = pytest.mark.parametrize("scheme", schemes.BLOCK_SCALED)
three = pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8"])


@pytest.fixture(autouse=True)
def products(monkeypatch, request):
    named = getattr(request, "param", "sm_100a")
    fake = fake_cutlass.install(monkeypatch, named)
    forget()
    yield fake
    monkeypatch.undo()
    forget()


def case(scheme: str, **options) -> Case:
    return case_of("cpu", scheme, **{"K": 64, "I": 64, **options})


def known(given: Case, num_experts: int = 1) -> Case:
    """The case with known activation scales: one of all experts, or one of each."""
    steps = torch.linspace(0.5, 2.0, num_experts) if num_experts > 1 else torch.ones(())
    w13, w2 = given.args[1:3]
    given.args[1] = w13._replace(activation_scale=0.0013 * steps)
    last = steps.flip(0) if num_experts > 1 else steps
    given.args[2] = w2._replace(activation_scale=0.0017 * last)
    return given


@all_schemes
@pytest.mark.parametrize("products", ["sm_100a", "sm_120a"], indirect=True)
def test_values(scheme, products):
    check(case(scheme, M=17, E=5, top_k=3))
    architecture = next(iter(products.calls)).split("_")[2]
    name = f"moe_ops_{architecture}_{scheme.split(':')[0]}_bf16"
    assert architecture in ("sm100", "sm120") and products.calls == [name] * 2


@three
@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "ids_dtype": torch.int64, "weights_dtype": BF16, "M": 13, "E": 6},
        {"on_input": True, "top_k": 1, "M": 9},
        {"M": 3, "ids": torch.tensor([[-1, 4], [-9, 99], [2**31 - 1, -(2**31)]])},
        {"E": 1, "top_k": 3, "M": 5},
        {"M": 2, "K": 1120, "I": 96},  # two chunks of columns
    ],
    ids=lambda o: "-".join(o),
)
def test_options(scheme, options):
    check(case(scheme, **options))


@three
@pytest.mark.parametrize("K, I", [(32, 96), (160, 224)])
def test_padded_scales(scheme, K, I):
    """Numbers of scales that 4 does not divide: what follows them multiplies zeros."""
    check(case(scheme, M=5, E=2, K=K, I=I))


@pytest.mark.slow
@three
def test_experts_of_several_tiles(scheme):
    """Scales of the second expert begin where 128 divides, and those of the first fill two
    tiles."""
    ids = torch.zeros(150, 1, dtype=torch.int32)
    ids[130:] = 2
    check(case(scheme, M=150, top_k=1, ids=ids, E=3, K=32, I=32))


@pytest.mark.parametrize("num_experts", [1, 5])
def test_known_scales(num_experts):
    """One, or one of each expert: a token is quantized anew for each of its experts."""
    check(known(case("nvfp4", M=12, E=5, top_k=3), num_experts))


@pytest.mark.parametrize("which", [1, 2])
def test_one_known_scale(which):
    """That of the input alone, or that of the activation's output."""
    given = known(case("nvfp4", M=9))
    given.args[which] = given.args[which]._replace(activation_scale=None)
    check(given)


@pytest.mark.parametrize("num_experts", [0, 5])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_global_scales_of_rows(activation, num_experts):
    """Of w13. Activations have a known scale of each expert, or one from the data."""
    given = case("nvfp4", activation=activation, M=12, E=5, top_k=3, I=96)
    given = known(given, num_experts) if num_experts else given
    given.args[1] = with_global_rows(given.args[1])
    check(given)


@pytest.mark.parametrize("activation", ["swigluoai", "relu2_no_mul"])
def test_activations(activation):
    check(case("nvfp4", activation=activation, M=9, E=3))
    check(case("mxfp4", activation=activation, M=9, E=3))


@three
def test_strided_rows(scheme):
    given = case(scheme, M=7)
    wide = garbage(torch.empty(7, 2 * 64 + 6, dtype=BF16))
    given.args[0] = wide[:, 3:-3:2].copy_(given.args[0])
    check(given)


@pytest.mark.slow
@three
def test_chunks_are_one_piece(scheme):
    """Also where all tokens share a global scale."""
    given = case(scheme, M=37, E=3)
    whole = check(given)
    x, w13, w2, _, ids = given.args_for("cutlass")
    call = {**given.options, "backend": "cutlass"}
    most = moe_ops.explain(x, w13, w2, ids, **call).num_bytes(16)
    out = moe_ops.fused_experts(*given.args_for("cutlass"), **call, max_workspace_bytes=most)
    assert torch.equal(out, whole)


@all_schemes
@pytest.mark.parametrize("num_experts", [0, 4])
def test_rows_are_quantized_as_numerics_do(scheme, num_experts, products):
    """Bit for bit: elements and scales that the kernels wrote."""
    given = case(scheme, M=11, E=4, top_k=1, K=96, ids=torch.arange(11).view(11, 1) % 4)
    x = given.args[0]
    x *= torch.logspace(-3, 3, 96)
    x[3, 32:64] = 0
    x[4] = -0.0
    if num_experts and scheme != "nvfp4":
        pytest.skip("has no global scale")
    scale = None
    if num_experts:
        known(given, num_experts)
        scale = given.args[1].activation_scale[torch.arange(11) % 4].unsqueeze(1)
    given.run("cutlass")
    found = numerics.quantize_activation(x, scheme, scale)
    for e, (codes, scales) in enumerate(products.operands[:4]):
        wanted = found.q[e::4].view(torch.uint8)
        if scheme == "mxfp8":  # encoded in software, small negative numbers become 0, not -0
            codes, wanted = [t.where(t != 128, 0) for t in (codes, wanted)]
        assert torch.equal(codes, wanted)
        groups = found.scale.shape[1]
        assert torch.equal(scales[:, :groups], found.scale[e::4].view(torch.uint8))
        assert (scales[:, groups:] == 0).all()


@pytest.mark.slow
@three
def test_one_graph_for_every_number_of_tokens(scheme):
    torch._dynamo.reset()
    given = case(scheme, M=9)
    x, w13, w2, weights, ids = given.args_for("cutlass")
    x, weights = x.nan_to_num(), weights.nan_to_num()

    def layer(x, weights, ids):
        return moe_ops.fused_experts(x, w13, w2, weights, ids, backend="cutlass")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (9, 4, 7):
            some = [t[:rows].clone() for t in (x, weights, ids)]
            assert torch.equal(compiled(*some), layer(*some))


# --- what is refused -----------------------------------------------------------------------------


def problem(scheme: str, **options) -> Problem:
    return Problem(
        **{
            "kind": "experts",
            "num_experts": 4,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_rows": 256,
            "top_k": 2,
            "dtype": BF16,
            "scheme": scheme,
            "layout": "cutlass_swizzled",
            **options,
        }
    )


def on(*capability: int) -> Machine:
    return Machine("cuda", capability, available=("cutlass",))


@all_schemes
@pytest.mark.parametrize("capability", schemes.CAPABILITIES[schemes.BLOCKS])
def test_what_runs(scheme, capability):
    assert backend.supports(problem(scheme), on(*capability)) == []


@pytest.mark.parametrize(
    "scheme, options, capability, reason",
    [
        ("nvfp4", {"hidden_size": 144}, (10, 0), "K to be a multiple of 32, got 144"),
        ("nvfp4", {"intermediate_size": 80}, (10, 0), "I to be a multiple of 32, got 80"),
        ("mxfp4", {"intermediate_size": 80}, (12, 0), "I to be a multiple of 32, got 80"),
        ("mxfp8", {"hidden_size": 144}, (12, 0), "K to be a multiple of 32, got 144"),
        ("nvfp4", {}, (9, 0), "compute capability 10.0 and 12.0, got 9.0"),
        ("mxfp8", {}, (10, 3), "compute capability 10.0 and 12.0, got 10.3"),
        ("fp8_channel", {"layout": ""}, (10, 0), "compute capability 9.0, got 10.0"),
        ("nvfp4", {"dtype": FP16}, (10, 0), "takes bfloat16 hidden_states with nvfp4"),
        ("nvfp4", {"layout": ""}, (10, 0), "moe_ops.prepare.w13, 'cutlass'"),
        ("nvfp4", {"layout": "flashinfer_swizzled"}, (10, 0), "got 'flashinfer_swizzled'"),
        ("mxfp4", {"has_bias": True}, (10, 0), "takes no bias"),
        ("mxfp4", {"contiguous_weights": False}, (10, 0), "contiguous weights and scales"),
    ],
)  # fmt: skip
def test_what_is_refused(scheme, options, capability, reason):
    reasons = backend.supports(problem(scheme, **options), on(*capability))
    assert len(reasons) == 1
    with pytest.raises(ValueError, match=reason):
        raise ValueError(reasons[0])


@three
@pytest.mark.parametrize("other", ["torch", "triton", "flashinfer", "deep_gemm"])
def test_other_backends_refuse_prepared_weights(scheme, other):
    registered = {b.name: b for b in moe_ops.backends.BACKENDS}
    reasons = registered[other].supports(problem(scheme), on(10, 0))
    named = "cutlass_swizzled" if scheme in registered[other].takes.native_schemes else "."
    assert reasons and re.search(named, " ".join(reasons)), reasons


@three
def test_prepared_weights_are_refused_by_name(scheme):
    given = case(scheme)
    args = given.args_for("cutlass")
    with pytest.raises(ValueError, match="cutlass_swizzled"):
        moe_ops.fused_experts(*args, backend="torch")


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_120a"])
def test_an_old_compiler_is_named(architecture, monkeypatch, tmp_path):
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho release 12.6, V12.6.85\n")
    old.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(old))
    with pytest.raises(build.BuildError, match=rf"12.8 or newer for {architecture}, got 12.6"):
        build.build(architecture, tmp_path / "object.so")
