"""torch's own list of operations on quantized weights: each gives what it gives of `dequantize()`,
or raises an error that says what is quantized.
"""

import io
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

import moe_ops
from moe_ops.schemes import get_scheme
from moe_ops.tensors import ExpertTensor, flatten, unflatten
from tests.tensors.test_e4m3 import same, sample

SCHEMES = ("fp8_block", "int8_w8a16:g64:zp", "int4_w4a16:g32", "int4_w4a8", "mxfp4_w4a16", "nvfp4")
schemes = pytest.mark.parametrize("scheme", SCHEMES)
E, N, K = 4, 128, 256


def make(scheme, *shape, **kwargs):
    return moe_ops.quantize(sample(*(shape or (E, N, K)), **kwargs), scheme)


# --- torch's list of operations ------------------------------------------------------------------

# values that torch leaves undefined
UNDEFINED = ("empty_like", "new_empty")


def quantized(t):
    """A tensor of two or three dimensions, quantized; None for others."""
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.dtype != torch.float32:
        return None
    if t.dim() not in (2, 3) or 0 in t.shape or not t.isfinite().all():
        return None
    whole = t.detach().contiguous()
    if t.dim() == 3:
        return moe_ops.quantize(whole, "fp8_tensor")
    return moe_ops.quantize(whole.unsqueeze(0), "fp8_tensor")[0]


def arguments(sample):
    """(input, args) of a sample with its tensors quantized: the input, then all others."""
    several = isinstance(sample.input, (list, tuple))
    tensors = list(sample.input) if several else [sample.input]
    for own, others in ((True, False), (False, True)):
        changed = [quantized(t) if own else None for t in tensors]
        rest = [quantized(t) if others else None for t in sample.args]
        if any(t is not None for t in (*changed, *rest)):
            given = [t if q is None else q for t, q in zip(tensors, changed, strict=True)]
            yield (
                given if several else given[0],
                [t if q is None else q for t, q in zip(sample.args, rest, strict=True)],
            )


def outcome(function, arguments, plain):
    """What a function returns for copies of its arguments, dequantized where `plain`; or what it
    raises.
    """

    def copied(t):
        if not isinstance(t, torch.Tensor):
            return t
        return t.dequantize() if plain and isinstance(t, ExpertTensor) else t.clone()

    given = tree_map(copied, arguments, is_leaf=lambda t: isinstance(t, torch.Tensor))
    # not torch.manual_seed, which keeps the caller's stack for each kind of device not there
    torch.default_generator.manual_seed(0)
    try:
        return function(given[0], *given[1], **given[2]), given[0]
    except Exception as error:
        return error


def equal(got, want):
    got, want = tree_flatten(got)[0], tree_flatten(want)[0]
    return len(got) == len(want) and all(map(equal_leaves, got, want))


def equal_leaves(got, want):
    if not isinstance(want, torch.Tensor):
        return got == want or got != got
    if (got.shape, got.dtype, got.layout) != (want.shape, want.dtype, want.layout):
        return False
    if isinstance(got, ExpertTensor):
        return got.stride() == want.stride() and torch.equal(got.dequantize(), want)
    if got.layout != torch.strided:
        got, want = got.to_dense(), want.to_dense()
    return torch.allclose(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_operation_of_torch():
    from torch.testing._internal.common_methods_invocations import op_db

    wrong, counts = {}, {"equal": 0, "named": 0, "both raise": 0}
    for op in op_db:
        if torch.float32 not in op.dtypes or op.name in UNDEFINED:
            continue
        variants = {"": op.op, ".method": op.method_variant, "_": op.inplace_variant}
        # not op.sample_inputs, which inspects the caller's stack for each of them: among the
        # modules of a whole run of tests that takes two minutes
        torch.default_generator.manual_seed(0)
        samples = op.sample_inputs_func(op, "cpu", torch.float32, False)
        for sample_ in itertools.islice(samples, 6):
            for own, args in arguments(sample_):
                for variant, function in variants.items():
                    if function is None or variant and not isinstance(own, torch.Tensor):
                        continue
                    given = own, args, sample_.kwargs
                    got, want = outcome(function, given, False), outcome(function, given, True)
                    if isinstance(got, Exception):
                        named = "quantized" in str(got) or "ExpertTensor" in str(got)
                        kind = "named" if named else "both raise"
                        fine = named or isinstance(want, Exception)
                    else:
                        kind = "equal"
                        fine = not isinstance(want, Exception) and equal(
                            got if variant == "_" else got[0], want if variant == "_" else want[0]
                        )
                    if fine:
                        counts[kind] += 1
                    else:
                        wrong[op.name + variant] = (got, want)
    assert not wrong
    assert counts["equal"] > 200 and counts["named"] > 2000, counts


# --- views ---------------------------------------------------------------------------------------


@schemes
def test_one_dimension(scheme):
    """What FSDP2 makes of its shards, `view(-1)`, is what it is of any tensor."""
    q = make(scheme)
    want = q.dequantize()
    for flat in (
        q.view(-1),
        q.view(want.numel()),
        q.flatten(),
        q.reshape(-1),
        q.ravel(),
        q.view(-1).view(-1),
        q.view(-1).clone(),
        q.view(-1)[:],
    ):
        assert type(flat) is type(q) and flat.shape == (E * N * K,) and flat.stride() == (1,)
        assert torch.equal(flat.dequantize(), want.view(-1))
        assert same(flat.view(E, -1, K), q) and same(flat.reshape(q.shape), q)
    assert torch.equal(q[1].view(-1).dequantize(), want[1].view(-1))
    turned = q.mT.contiguous()
    assert turned.is_contiguous() and torch.equal(turned.dequantize(), want.mT)
    assert torch.equal(turned.view(-1).dequantize(), want.mT.reshape(-1))
    for join in (torch.cat, torch.concat, torch.hstack):
        joined = join([q.view(-1), want.view(-1)])
        assert type(joined) is torch.Tensor and torch.equal(joined, join([want.view(-1)] * 2))
    assert q.view(-1).qdata.data_ptr() == q.qdata.data_ptr()
    assert torch.equal(q.view(-1).half().dequantize(), q.half().dequantize().view(-1))
    with torch.inference_mode():
        assert torch.equal(q.flatten().dequantize(), want.flatten())
    assert same(q.view(E, N, -1), q) and same(q.reshape(-1, N, K), q)
    for bad in (lambda t: t[:3], lambda t: t.narrow(0, 0, 2), lambda t: t.chunk(2)):
        with pytest.raises(ValueError, match=rf"restore its shape first, view\({E}, {N}, {K}\)"):
            bad(q.view(-1))
    for bad in (
        lambda: q.view(E * N, K),
        lambda: q.flatten(0, 1),
        lambda: q.reshape(E, N * K),
        lambda: q.view(-1).view(N, E, K),
    ):
        with pytest.raises(ValueError, match="a view of .* must have its shape, or one dimension"):
            bad()
    for bad in (lambda: q.view(3, -1), lambda: q.mT.view(-1)):
        with pytest.raises(RuntimeError):  # as of any tensor
            bad()
    x = sample(2, E * N * K, dtype=torch.float32)
    values = q.float().dequantize().view(-1)
    assert torch.equal(F.linear(x, q.float().view(-1)), F.linear(x, values))
    file = io.BytesIO()
    torch.save(q.view(-1), file)
    file.seek(0)
    assert same(torch.load(file), q.view(-1))
    assert same(unflatten(*flatten({"w": q.view(-1)}))["w"], q.view(-1))
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="w13 must have its natural layout, got a flat view"):
        moe_ops.fused_experts(sample(2, K), q.view(-1), q.view(-1), torch.ones(2, 1), ids)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_dimension_of_sizes_that_groups_do_not_divide(scheme):
    for shape in ((3, 100, 192), (2, 130, 64), (1, 7, 256)):
        if get_scheme(scheme).why_not_shape(*shape[1:]):
            continue
        q = make(scheme, *shape)
        for whole in (q, q[-1:], q[0]):
            flat, want = whole.view(-1), whole.dequantize().reshape(-1)
            assert torch.equal(flat.dequantize(), want)
            assert torch.equal(torch.cat([flat, want[:2]]), torch.cat([want, want[:2]]))
            assert same(flat.view(whole.shape), whole)


def test_prepared_weights_in_one_dimension():
    for scheme in ("", "fp8_block", "int4_w4a16:g32"):
        weight = sample(2, 256, 128)
        weight = moe_ops.prepare(
            moe_ops.quantize(weight, scheme) if scheme else weight, "flashinfer", activation="silu"
        )
        if not hasattr(weight, "weight_layout"):
            continue
        flat = weight.view(-1)
        assert torch.equal(flat.dequantize(), weight.dequantize().view(-1))
        assert flat.view(weight.shape).weight_layout == weight.weight_layout


def test_as_strided_is_a_view():
    q = make("fp8_block")
    assert same(q.as_strided(q.shape, q.stride()), q)
    assert same(q.as_strided(q.shape, q.stride(), 0), q)
    assert same(q.as_strided((E * N * K,), (1,)), q.view(-1))
    assert same(q.view(-1).as_strided(q.shape, q.stride(), 0), q)
    for args in (
        ((8,), (1,)),
        ((E * N * K,), (2,)),
        ((E, K, N), (N * K, N, 1)),
        (q.shape, q.stride(), 5),
        (q.mT.shape, q.mT.stride()),
    ):
        with pytest.raises(ValueError, match="must (keep|have) its shape"):
            q.as_strided(*args)
    with pytest.raises(ValueError, match="must (keep|have) its shape"):
        q[1:].as_strided(q[1:].shape, q.stride(), 0)


def test_transposes_of_matrices_alone():
    q = make("fp8_block")
    for one in (q[1].T, q[1].t(), torch.t(q[1]), q[1].mT, q[1].H):
        assert torch.equal(one.dequantize(), q.dequantize()[1].T)
    for bad in (lambda: q.T, lambda: q.t(), lambda: torch.t(q)):
        with pytest.raises(ValueError, match="of one expert's matrix, got .*; mT exchanges"):
            bad()


@pytest.mark.parametrize("scheme", ["fp8_tensor", "int4_w4a16:g32"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_parts_stay_within_bounds(scheme, dim):
    q = make(scheme)
    want, size = q.dequantize(), q.shape[dim]
    for start, length in ((-size // 2, size // 4), (0, size), (size, 0), (-size, size // 2)):
        got = q.narrow(dim, start, length)
        assert torch.equal(got.dequantize(), want.narrow(dim, start, length))
    start = torch.tensor(size // 2)
    assert torch.equal(
        q.narrow(dim, start, size // 2).dequantize(), want.narrow(dim, start, size // 2)
    )
    for start, length in (
        (0, size + 1),
        (size // 2, size),
        (0, -1),
        (-size - 1, 1),
        (size + 1, 0),
    ):
        with pytest.raises(IndexError, match=f"narrow of .* stay within its {size} entries"):
            q.narrow(dim, start, length)
        with pytest.raises((IndexError, RuntimeError)):
            want.narrow(dim, start, length)
    half, quarter = size // 2, size // 4
    for sizes in (half, [quarter, half, quarter], size, 2 * size, (half, half)):
        parts, plain = q.split(sizes, dim), want.split(sizes, dim)
        assert len(parts) == len(plain)
        for part, other in zip(parts, plain, strict=True):
            assert torch.equal(part.dequantize(), other)
    for sizes in ([half], [size, half], [-half, size + half], 0, -1):
        for split in (torch.split, torch.Tensor.split):
            with pytest.raises(ValueError, match=f"split of .* parts of together {size} entries"):
                split(q, sizes, dim)
    for chunks in (0, -1):
        with pytest.raises(ValueError, match="chunks must be at least 1"):
            q.chunk(chunks, dim)
    with torch.inference_mode(), pytest.raises((ValueError, RuntimeError)):
        q.split([half], dim)


def test_parts_of_nothing():
    q, want = make("fp8_tensor")[:0], torch.empty(0, N, K)
    for got, expected in ((q.split(2), want.split(2)), (q.chunk(3), want.chunk(3))):
        assert [part.shape for part in got] == [part.shape for part in expected]


# --- new tensors, and memory ---------------------------------------------------------------------


@schemes
def test_zeros_are_zero(scheme):
    q = make(scheme)
    for zeros, shape in (
        (q.new_zeros(q.shape), q.shape),
        (q.new_zeros((2, N, K)), (2, N, K)),
        (torch.zeros_like(q), q.shape),
        (q[1].new_zeros((N, K)), (N, K)),
    ):
        assert type(zeros) is type(q) and zeros.scheme == q.scheme and zeros.shape == shape
        assert torch.equal(zeros.dequantize().abs(), torch.zeros(shape, dtype=q.dtype))
    assert q.new_zeros(q.shape, dtype=torch.float16).dtype == torch.float16
    assert q.new_zeros(q.shape, device="meta").scale.device.type == "meta"
    again = moe_ops.from_quantized(
        scheme, **{n: getattr(torch.zeros_like(q), n) for n in q.__tensor_flatten__()[0]}
    )
    assert not again.dequantize().any()
    for like in (torch.empty_like, torch.zeros_like):
        with pytest.raises(ValueError, match="dtype of quantized weights must be"):
            like(q, dtype=torch.int32)
    with pytest.raises(ValueError, match="differ in the number of experts alone"):
        q[1].new_zeros((2, K))


def test_a_scale_of_activations_of_each_expert():
    """It is as long as there are experts; one of all is copied into it as that of each."""

    def quantized(scale):
        return moe_ops.quantize(sample(E, N, K), "fp8_tensor_static", activation_scale=scale)

    each, shared = quantized(torch.arange(1.0, E + 1)), quantized(0.5)
    fewer = each.new_zeros((2, N, K))
    assert torch.equal(fewer.activation_scale, torch.ones(2))
    assert fewer.copy_(each[1:3]) is fewer and fewer.activation_scale.tolist() == [2, 3]
    assert shared.new_zeros((2, N, K)).activation_scale.shape == ()
    whole = torch.zeros_like(each)
    assert whole.copy_(shared) is whole
    assert whole.activation_scale.tolist() == [0.5] * E and torch.equal(whole.qdata, shared.qdata)
    one = torch.zeros_like(shared)
    with pytest.raises(ValueError, match=r"^activation_scale of a copy into .* hold those of all"):
        one.copy_(each)
    assert not one.qdata.float().any()  # nothing was copied


@schemes
def test_data_is_replaced_whole(scheme):
    q, other = make(scheme), make(scheme, 2, N, K, seed=1).to(torch.float16)
    weight = nn.Parameter(q, requires_grad=False)
    weight.data = other
    assert isinstance(weight, nn.Parameter) and weight.dtype == torch.float16
    assert weight.shape == (2, N, K) and same(weight.detach(), other)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # as of any tensor
        weight.data = weight.data.to("meta")
    assert same(weight.detach(), other)
    with pytest.raises(ValueError, match="data of .* must be of its class, got a plain tensor"):
        weight.data = sample(2, N, K)
    with pytest.raises(ValueError, match="must be of its class, got "):
        weight.data = make("fp8_block" if scheme != "fp8_block" else "nvfp4")


def test_data_of_another_scheme_and_layout():
    weight, other = make("fp8_block"), make("fp8_channel").mT
    weight.data = other
    assert same(weight, other) and weight.scheme == "fp8_channel"
    assert weight.weight_layout == "transposed" and weight.stride() == other.stride()


@schemes
def test_shared_and_pinned_memory(scheme):
    q = make(scheme)
    assert not q.is_shared() and q.share_memory_() is q and q.is_shared() and q.scale.is_shared()
    module = nn.Module()
    module.weight = nn.Parameter(make(scheme), requires_grad=False)
    assert module.share_memory().weight.is_shared()
    assert not q.is_pinned()
    if torch.cuda.is_available():
        assert q.pin_memory().is_pinned()


@schemes
@pytest.mark.parametrize("form", ["pickle", "zip", "legacy"])
def test_every_way_to_pickle(scheme, form):
    q = make(scheme)
    state = {"whole": q, "view": q[1:, :, :128].mT, "parameter": nn.Parameter(q, False)}
    file = io.BytesIO()
    if form == "pickle":
        loaded = pickle.loads(pickle.dumps(state))
    else:
        torch.save(state, file, _use_new_zipfile_serialization=form == "zip")
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    for name, weight in state.items():
        assert same(loaded[name], weight), name


def test_changes_in_place_say_how_to_change_a_weight():
    """Adapters are merged so."""
    q = make("fp8_block")
    for change in (lambda: q.add_(1), lambda: q.zero_(), lambda: q.data.add_(sample(E, N, K))):
        with pytest.raises(NotImplementedError, match="into plain weights.*merge_adapters"):
            change()
    same_values = q.dequantize()
    assert q.copy_(same_values) is q
    with pytest.raises(ValueError, match="a plain tensor of other values; .*moe_ops.quantize"):
        q.copy_(same_values + 1)


def layer(scheme):
    """What `fused_experts` computes of w13, and two weights."""
    w2 = make(scheme, E, K, N // 2)
    rows, weights, ids = sample(3, K), torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]])

    def run(w13):
        return moe_ops.fused_experts(rows, w13, w2, weights, ids)

    return run, make(scheme), moe_ops.quantize(sample(E, N, K).roll(2, 0), scheme)


def set_all(w, new):
    w.copy_(new)


def set_one(w, new):
    w[1] = new[2]


def set_some(w, new):
    w[1:3].copy_(new[:2])


def set_flat(w, new):
    w.view(-1).copy_(new.view(-1))


def swap(w, new):
    kept = w[0].clone()
    w[0].copy_(w[3])
    w[3].copy_(kept)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("scheme", ["fp8_block", "int4_w4a16:g32", "nvfp4"])
@pytest.mark.parametrize("write", [swap, set_all, set_one, set_some, set_flat])
def test_compiled_code_uses_a_weight_that_it_has_written(write, scheme, backend):
    """As expert caches do: the weight is an input of the graph, and so were its tensors."""
    run, w, new = layer(scheme)

    def step(w, new):
        before = run(w)
        write(w, new)
        return before, run(w)

    want = step(w.clone(), new)
    assert not torch.equal(*want)
    torch._dynamo.reset()
    written = w.clone()
    got = torch.compile(step, backend=backend, fullgraph=True)(written, new)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    again = w.clone()
    write(again, new)
    assert same(written, again)


@pytest.mark.slow
def test_compiled_branches_take_quantized_weights():
    """Which cannot be their inputs: their tensors are."""
    run, w, _ = layer("int8_w8a16")

    def chosen(x, w):
        return torch.cond(x.sum() > 0, run, lambda w: run(w) * 2, (w,))

    torch._dynamo.reset()
    call = torch.compile(chosen, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for x in (torch.ones(2), -torch.ones(2)):
            torch.testing.assert_close(call(x, w), chosen(x, w), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_that_are_no_parameters_are_exported(strict):
    run, w, _ = layer("int8_w8a16")

    class Module(nn.Module):
        def forward(self, x):
            return x + run(w)

    program = torch.export.export(Module(), (sample(3, K),), strict=strict).run_decompositions()
    assert not any("part" in str(node.target) for node in program.graph.nodes)
    x = sample(3, K)
    torch.testing.assert_close(program.module()(x), x + run(w), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_weights_that_are_arguments_are_exported(strict):
    """A program computes with the weights that it is given."""
    ids = torch.tensor([[0, 1], [1, 2], [3, 0]])

    class Module(nn.Module):
        def forward(self, x, weights):
            return moe_ops.fused_experts(x, *weights, torch.ones(3, 2), ids)

    module, x = Module(), sample(3, K)
    given = [
        [make("int8_w8a16", *shape, seed=i) for shape in ((E, N, K), (E, K, N // 2))]
        for i in (0, 1)
    ]
    program = torch.export.export(module, (x, given[0]), strict=strict).module()
    for weights in given:
        got, want = program(x, weights), module(x, weights)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_parts_are_those_of_quantized_weights():
    with pytest.raises(ValueError, match="weight must be a quantized weight, got a Tensor"):
        torch.ops.moe_ops.part(sample(3), "qdata")


QUICKLY_COMPILED = ("fp8_block", "int4_w4a16:g32")  # with activations that are quantized, and not


@pytest.mark.parametrize(
    "compiled, scheme",
    [
        pytest.param(compiled, scheme, marks=[pytest.mark.slow] if slow else [])
        for compiled in (False, True)
        for scheme in SCHEMES
        for slow in [compiled and scheme not in QUICKLY_COMPILED]
    ],
)
def test_a_weight_written_before_the_backward_pass_is_noticed(scheme, compiled):
    w13, w2, new = make(scheme, E, 2 * N, K), make(scheme, E, K, N), make(scheme, E, 2 * N, K)
    x = sample(3, K).requires_grad_()
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]])
    torch._dynamo.reset()
    call = torch.compile(moe_ops.fused_experts, backend="aot_eager") if compiled else None
    out = (call or moe_ops.fused_experts)(x, w13, w2, weights, ids)
    with torch.no_grad():
        w13.copy_(new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


aten = torch.ops.aten
WRITES = {  # (the parameter, what it was made of, new weights)
    "in one piece": lambda p, base, new: p.copy_(new),
    "what the Parameter was made of": lambda p, base, new: base.copy_(new),
    "an expert": lambda p, base, new: p.__setitem__(1, new[1]),
    "some experts": lambda p, base, new: p.__setitem__(slice(1, 3), new[1:3]),
    "some rows": lambda p, base, new: p.__setitem__((0, slice(0, 128)), new[0, :128]),
    "an expert's rows": lambda p, base, new: p[1][:128].copy_(new[1, :128]),
    "select": lambda p, base, new: aten.select(p, 0, 1).copy_(new[1]),
    "slice": lambda p, base, new: aten.slice(p, 0, 1, 3).copy_(new[1:3]),
    "unbind": lambda p, base, new: aten.unbind(p)[1].copy_(new[1]),
    "split": lambda p, base, new: aten.split(p, 2)[1].copy_(new[2:]),
    "tensor_split": lambda p, base, new: p.tensor_split(2)[1].copy_(new[2:]),
    "chunk": lambda p, base, new: p.chunk(2)[1].copy_(new[2:]),
    "transpose": lambda p, base, new: aten.transpose(p, 1, 2).copy_(new.mT),
    "mT": lambda p, base, new: p.mT.copy_(new.mT),
    "t": lambda p, base, new: aten.t(p[1]).copy_(new[1].t()),
    "detach": lambda p, base, new: p.detach().copy_(new),
    "detach of an expert": lambda p, base, new: p[1].detach().copy_(new[1]),
    "alias": lambda p, base, new: aten.alias(p).copy_(new),
    "view": lambda p, base, new: p.view(p.shape).copy_(new),
    "flat view": lambda p, base, new: p.view(-1).copy_(new.view(-1)),
    "flat view back": lambda p, base, new: p.view(-1).view(p.shape).copy_(new),
    "reshape": lambda p, base, new: p.reshape(-1).copy_(new.view(-1)),
    "as_strided": lambda p, base, new: p.as_strided(p.shape, p.stride()).copy_(new),
    "data": lambda p, base, new: p.data.copy_(new),
    "foreach": lambda p, base, new: torch._foreach_copy_([p, p[1]], [new, new[1]]),
    "qdata": lambda p, base, new: p.qdata.copy_(new.qdata),
    "scale of a view": lambda p, base, new: p.view(-1).scale.mul_(2),
    "in inference mode": torch.inference_mode()(lambda p, base, new: p.copy_(new)),
    "an expert in inference mode": torch.inference_mode()(
        lambda p, base, new: p.__setitem__(1, new[1])
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_versions_are_those_of_all_views(write):
    """Whatever shares memory with a weight tells the backward passes of all that do."""
    down, new = make("int4_w4a16:g32", E, K, N), make("int4_w4a16:g32", E, 2 * N, K, seed=1)
    base = make("int4_w4a16:g32", E, 2 * N, K)
    w13 = nn.Parameter(base, requires_grad=False)
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]])
    x = sample(3, K).requires_grad_()
    out = moe_ops.fused_experts(x, w13, down, weights, ids).sum()
    torch.autograd.grad(out, x, retain_graph=True)
    with torch.no_grad():
        WRITES[write](w13, base, new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_module_that_was_loaded_before_the_backward_pass_is_noticed():
    w13, w2 = make("fp8_block", E, 2 * N, K), make("fp8_block", E, K, N)
    parameters = {n: nn.Parameter(w, requires_grad=False) for n, w in (("w13", w13), ("w2", w2))}
    module = nn.ParameterDict(parameters)
    x = sample(3, K).requires_grad_()
    ids = torch.tensor([[0, 1], [1, 2], [3, 0]])
    out = moe_ops.fused_experts(x, module["w13"], module["w2"], torch.rand(3, 2), ids)
    module.load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_weights_are_written_together():
    """As weights are sent to the engine that serves them."""
    targets, sources = [make("fp8_block"), sample(3)], [make("fp8_block"), sample(3)]
    torch._foreach_copy_(targets, sources)
    assert same(targets[0], sources[0]) and torch.equal(targets[1], sources[1])


@pytest.mark.parametrize("function", [torch.baddbmm, torch.bmm, torch.matmul])
def test_products_are_not_lost_in_a_weight(function):
    q = make("int8_w8a16")
    factors = (sample(E, N, 2), sample(E, 2, K))
    with pytest.raises(NotImplementedError, match="merge adapters into plain weights"):
        function(*((q,) if function is torch.baddbmm else ()), *factors, out=q)


@pytest.mark.slow
def test_parts_of_symbolic_sizes():
    """Of a second number of experts, which a compiler makes a symbol."""

    def parts(w):
        chosen = (w.chunk(2)[1], w.chunk(3, 1)[2], w.split(w.shape[0] // 2)[0])
        return [t.dequantize() for t in chosen]

    torch._dynamo.reset()
    call = torch.compile(parts, backend="aot_eager", fullgraph=True)
    for experts in (4, 6, 8):
        w = make("int8_w8a16", experts, 6, 32)
        for got, want in zip(call(w), parts(w), strict=True):
            assert torch.equal(got, want)


def test_arrays_and_ranges_are_indices():
    w = make("int8_w8a16")
    for index in (np.array([2, 0]), range(2, -1, -2), [2, 0], torch.tensor([2, 0])):
        assert same(w[index], w[[2, 0]])
    assert same(w[np.int64(2)], w[2])
    for index in ([], range(0), np.array([], int), torch.tensor([], dtype=torch.int64)):
        assert w[index].shape == (0, N, K)


def test_jit_trace_is_refused_by_name():
    q = make("fp8_block")
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace; use torch\.export\.export"):
        torch.jit.trace(lambda x: F.linear(x, q[0]), sample(2, K))
