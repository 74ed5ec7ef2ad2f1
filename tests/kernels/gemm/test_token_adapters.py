"""Layers whose tokens have adapters, by the Triton kernels against fp64: under the interpreter, or
on a GPU."""

import pytest
import torch

import moe_ops
from moe_ops import LoRAStack
from moe_ops.kernels import launch
from moe_ops.kernels.rows.scales import rows_of
from moe_ops.ops.args import TokenAdapters
from tests.autograd.test_stack import (
    MATRICES,
    adapters_of,
    check,
    check_not_finite,
    expected,
    ids_of,
    run,
)
from tests.support.cases import BF16, FP32, Case, assert_matches, tolerance
from tests.support.places import CUDA, INTERPRETED, ON_GPU

pytest.importorskip("triton")

from moe_ops.kernels.gemm import token_adapters
from moe_ops.kernels.gemm.operands import Output
from moe_ops.kernels.gemm.pair_adapters import InChunks, Summed
from moe_ops.kernels.gemm.token_adapters import AdapterProducts, Where
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, route_pairs, router_weights
from moe_ops.kernels.place.sort import route, sort_into

everywhere = pytest.mark.parametrize(
    "where",
    [
        pytest.param(("cpu", FP32), id="interpreted", marks=INTERPRETED),
        pytest.param(("cuda", FP32), id="cuda-fp32", marks=ON_GPU),
        pytest.param(("cuda", BF16), id="cuda-bf16", marks=ON_GPU),
    ],
)


@pytest.fixture(params=["pairs", "blocks"])
def each_way(request, monkeypatch):
    """Pair by pair, as calls of few pairs run, and by blocks, as others do."""
    if request.param == "blocks":
        monkeypatch.setattr(token_adapters, "MOST_PAIRS", 0)
    return request.param


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_plain_weights(where, activation):
    check(Case(*where, activation=activation, M=11, top_k=3), backend="triton")


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    "scheme",
    [
        *("fp8_block", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "int8_w8a8"),
        *("int4_w4a16:g32", "int4_w4a16:g64:zp", "int8_w8a16:channel", "fp8_w8a16:block"),
        *("mxfp4_w4a16", "mxfp4_mxfp8", "nvfp4_w4a16", "nvfp4", "int4_w4a8", "mxfp6_e2m3_w6a16"),
    ],
)
def test_quantized_weights(where, scheme):
    check(Case(*where, scheme, M=11, K=64, I=64), backend="triton")


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "M": 20, "E": 6},
        {"M": 1, "top_k": 4, "seed": 1},
        {"M": 0},
        {"M": 9, "ids_dtype": torch.int64, "weights_dtype": BF16},
        {"M": 60, "E": 2},  # more rows of an expert than a block
        {"M": 9, "K": 200, "I": 136},  # more than one tile of columns, the last not whole
        {"bias": True, "on_input": True, "top_k": 1, "expert_map": True},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("scheme", ["", "int8_w8a16:channel"], ids=["plain", "int8"])
def test_options(where, options, scheme):
    check(Case(*where, scheme, **options), backend="triton")


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block:ue8m0"])
@pytest.mark.parametrize("M", [3, 24], ids=["h in fp32", "h in e4m3"])
def test_groups_of_columns_that_share_a_scale(where, scheme, M):
    check(Case(*where, scheme, M=M, E=2, K=256, I=256), backend="triton")


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("ranks", [(1, 2), (16, 8, 3), (17, 70), (130, 40)], ids=str)
def test_every_rank(where, ranks):
    check(Case(*where, M=6), ranks, backend="triton")


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("of", [("a13", "b13"), ("a2", "b2")], ids=str)
def test_one_weight_alone(where, of):
    check(Case(*where, M=9), backend="triton", of=of)


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's products
@pytest.mark.parametrize("name", MATRICES)
def test_an_adapter_that_is_not_finite_is_its_tokens_alone(where, name):
    """Rows of all adapters are multiplied with the matrices of each in a block."""
    check_not_finite(Case(*where, M=9), name, "triton")


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("seed", range(12))
def test_any_mixture(where, seed):
    g = torch.Generator().manual_seed(seed)

    def between(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=g))

    scheme = ["", "int4_w4a16:g32", "fp8_block"][seed % 3]
    case = Case(
        *(*where, scheme),
        M=between(1, 24),
        E=between(1, 5),
        top_k=between(1, 3),
        K=16 * between(1, 5),
        I=16 * between(1, 4),
        expert_map=seed % 4 == 0,
        seed=seed,
    )
    check(case, [between(1, 20) for _ in range(between(1, 20))], backend="triton", seed=seed)


@everywhere
def test_a_kernel_is_compiled_for_no_mixture(where):
    """Which adapters tokens have, and how many rows of a block share one, are values alone."""
    case = Case(*where, M=8)
    adapters = adapters_of(case, (4, 4, 4))
    stack = LoRAStack.of(adapters)
    keys, key_of = set(), launch._specialization

    def noted(launches, device):
        found = key_of(launches, device)
        keys.add(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_specialization", noted)
        for seed in range(4):
            ids = ids_of(case, 3, seed)
            out = run(case, stack, ids, "triton")
            assert_matches(out, expected(case, adapters, ids), tolerance(case.dtype))
    assert len(keys) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("M", [1, 5, 40, 300])
@pytest.mark.parametrize(
    ("scheme", "I"),
    [
        ("", 256),
        ("fp8_block", 256),
        ("int4_w4a16:g128", 384),
        ("int8_w8a16:channel", 160),  # whose last chunk of columns overlaps the one before
        ("mxfp4_w4a16", 160),
        ("int4_w4a8", 256),
    ],
)
def test_kernels_that_are_chosen_on_a_gpu(scheme, I, M):
    """Those of mixed_gemm/sm90_wgmma.py among them, where the GPU has them."""
    case = Case("cuda", BF16, scheme, M=M, E=6, top_k=3, K=512, I=I)
    check(case, (16, 8, 3, 5), backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g128"])
@torch.no_grad()
def test_one_cuda_graph_for_all_mixtures(scheme):
    case = Case("cuda", BF16, scheme, M=9, E=6, K=512, I=256)
    adapters = adapters_of(case, (16, 8, 3))
    stack, ids = LoRAStack.of(adapters), ids_of(case, 3)

    def layer():
        return moe_ops.fused_experts(
            *case.args, **case.options, adapters=stack, adapter_ids=ids, backend="triton"
        )

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in range(3):
        ids.copy_(ids_of(case, 3, seed))
        if seed == 2:
            adapters[0] = adapters_of(case, (7,), seed=9)[0]
            stack.put(0, adapters[0])
        graph.replay()
        want = layer()
        assert torch.equal(out, want)
        best = min(
            [expected(case, adapters, ids, rounds) for rounds in (False, True)],
            key=lambda t: (t - out).norm(),
        )
        assert_matches(out, best, tolerance(BF16, scheme, "cuda"))


@everywhere
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("I", [128, 160], ids=["whole", "tail"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("block_m", "r"), [(8, 4), (64, 40)], ids=["few rows", "many rows"])
def test_columns_permuted_in_chunks(where, I, bits, block_m, r):
    """Rows of h as mixed_gemm/sm90_wgmma.py has them, whose kernels the interpreter lacks. Of many
    rows the shares of a sum are loaded one after the other.
    """
    wgmma = pytest.importorskip("tests.kernels.mixed_gemm.test_sm90_wgmma")
    device, dtype = where
    n, E, K, M, top_k, chunk = 3, 2, 32, 5, 2, 64
    g = torch.Generator().manual_seed(bits + I)

    def normal(*size):
        return torch.randn(*size, generator=g).to(dtype).to(device)

    a2, b2, h = normal(n, E, r, I) / I**0.5, normal(n, E, K, r), normal(M * top_k, I)
    topk_ids = torch.randint(0, E, (M, top_k), generator=g).to(torch.int32).to(device)
    ids = torch.tensor([0, 2, -1, 1, 2], device=device)
    scales = torch.tensor([1.0, 0.5, 2.0], device=device)
    gpu, S = launch.gpu(h.get_device()), M * top_k
    index = torch.empty(4 * S + S, dtype=torch.int32, device=device)
    routing = route_pairs(index, topk_ids, None, E, S, False)
    columns = wgmma.chunks_of(I, chunk, bits).flatten().to(device)
    stored = torch.where(columns >= 0, h[:, columns.clamp(min=0)], 0)
    space = torch.full((8 * S * r,), float("nan"), device=device)
    adapted = AdapterProducts(TokenAdapters(None, None, a2, b2, scales, ids), space)
    y, weights = normal(S, K).float(), torch.rand(M, top_k, generator=g).to(device)
    out = torch.full((M, K), float("nan"), device=device)
    want = y.double()
    around = adapted.around(
        *(normal(M, K), NO_ROUTER_WEIGHTS, 0, dtype, rows_of(stored), Output(y, 0, K, 1)),
        *(Summed(out, router_weights(weights)), Where(S, routing, block_m, gpu, False)),
        InChunks(chunk, bits, 16, I % chunk > 0),
    )
    launches = [route(routing, sort_into(block_m, S, E, 64), gpu), *around.between, *around.after]
    if around.summed is not None:
        launches.append(around.summed)
    launch.run(launches, h.get_device(), gpu)
    order = index[4 * S :].tolist()
    for position, pair in enumerate(order):
        i, e = int(ids[pair // top_k]), int(topk_ids.flatten()[pair])
        if i >= 0:
            u = a2[i, e].double() @ h[position].double()
            want[pair] += scales[i].double() * (b2[i, e].double() @ u)
    if around.summed is None:
        assert_matches(y, want, 2 * tolerance(dtype))
    else:
        of_tokens = weights.double().unsqueeze(2) * want.view(M, top_k, K)
        assert_matches(out, of_tokens.sum(1), 2 * tolerance(dtype))
