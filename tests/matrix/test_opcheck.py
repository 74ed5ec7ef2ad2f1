"""torch.library.opcheck, every utility of it, for every op registered in moe_ops::."""

from typing import NamedTuple

import pytest
import torch
from torch.library import opcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import backends
from moe_ops.ops.library import KINDS
from moe_ops.planning import auto
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
E, K, I, TOP_K, M = 3, 16, 16, 2, 4
# samples with quantized weights: their scheme
QUANTIZED = {
    "quantized": "fp8_channel",
    "zero_points": "int4_w4a16:channel:zp",
    "global_scale": "nvfp4",
}
# of backends whose kernels take bf16 and sizes of 128 alone: the same
SCHEMES_OF_LIBRARIES = {
    "deep_gemm": {"quantized": "fp8_block"},
    "deep_gemm_fp4": {"quantized": "mxfp4_w4a8"},
    "flashinfer": {"quantized": "fp8_tensor_static"},
    "cutlass": {
        "quantized": "fp8_channel",
        "static": "fp8_tensor_static",
        "prepared": "int4_w4a8",
    },
}
# what they may refuse in a sample: kinds of calls without plain weights, and GPUs
NOT_TAKEN = ("no kernel for plain weights", "plain weights in fused_experts alone")
NOT_TAKEN += ("compute capability", "got SM")
CUDA = torch.cuda.is_available()
OF_BACKENDS = {
    f"{backend.name}_{kind}": (backend, kind)
    for backend in (*backends.BACKENDS, auto.AUTO)
    for kind in backend.operators
}


class Call(NamedTuple):
    """One call of an op, as the library itself makes it."""

    op: torch._ops.OpOverload
    args: tuple
    kwargs: dict


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_ops":
            self.calls.append(Call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded(call, name: str) -> list[Call]:
    """The calls of moe_ops::<name> that `call()` makes, with tensors that require no gradient and
    written ones that hold no garbage."""
    with _Recorder() as recorder:
        call()
    found = []
    for op, args, kwargs in recorder.calls:
        if op._opname == name:
            written = [
                a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments
            ]
            values = []
            for value, is_written in zip(args, written, strict=False):
                if isinstance(value, torch.Tensor):
                    value = torch.zeros_like(value) if is_written else value.detach()
                values.append(value)
            found.append(Call(op, tuple(values), kwargs))
    assert found, f"the sample does not call {name}"
    return found


# --- samples -------------------------------------------------------------------------------------


def experts_call(
    kind: str,
    variant: str,
    device: str,
    backend: str,
    training: bool = False,
    adapted: bool = False,
    stack: moe_ops.LoRAStack | None = None,
    adapter_ids: torch.Tensor | None = None,
):
    """A function that calls one of the public functions."""
    dtype = torch.float32

    def strided(*shape):
        """Every other column of a wider tensor, or every other matrix of a longer one."""
        if variant != "everything":
            return torch.randn(shape, device=device, dtype=dtype)
        if len(shape) == 3:
            return torch.randn(2 * shape[0], *shape[1:], device=device, dtype=dtype)[::2]
        return torch.randn(*shape[:-1], 2 * shape[-1], device=device, dtype=dtype)[..., ::2]

    w13, w2 = strided(E, 2 * I, K), strided(E, K, I)
    if variant in QUANTIZED:
        w13, w2 = [moe_ops.quantize(w, QUANTIZED[variant]) for w in (w13, w2)]
    options = {"backend": backend}
    integers = torch.int32
    if variant == "everything":
        integers = torch.int64
        if kind != "grouped_linear":
            options |= {
                "activation": "swigluoai",
                "w13_bias": torch.randn(E, 2 * I, device=device, dtype=dtype),
                "w2_bias": torch.randn(E, K, device=device, dtype=dtype),
            }
    if adapted:  # of w2 alone where weights are plain
        sizes = ((4, K), (2 * I, 4), (3, I), (K, 3))
        matrices = [torch.randn(E, *size, device=device).requires_grad_() for size in sizes]
        matrices[:2] = (None, None) if variant == "plain" else matrices[:2]
        options["adapters"] = moe_ops.LoRA(*matrices, 0.5)
    if kind == "batched_experts":
        blocks = torch.randn(E, M, K, device=device, dtype=dtype)
        counts = torch.tensor([M, 0, 2], device=device, dtype=integers)
        return lambda: moe_ops.batched_experts(blocks, w13, w2, counts, **options)
    x = strided(M, K).requires_grad_(training)
    if training and variant not in QUANTIZED:
        w13.requires_grad_()
    if kind == "grouped_linear":
        offsets = torch.tensor([1, 1, 3], device=device, dtype=torch.int32)
        if variant == "everything":
            options["bias"] = torch.randn(E, 2 * I, device=device, dtype=dtype)
        return lambda: moe_ops.grouped_linear(x, w13, offsets, **options)
    if kind == "grouped_experts":
        counts = torch.tensor([2, 0, 1], device=device, dtype=integers)
        return lambda: moe_ops.grouped_experts(x, w13, w2, counts, **options)
    ids = torch.tensor([[0, 1], [2, 0], [-1, 2], [7, 0]], device=device, dtype=integers)
    weights = torch.rand(TOP_K, M, device=device).t()
    if variant == "everything":
        options["expert_map"] = torch.tensor([2, -1, 0, 1], device=device)
        ids = torch.stack([ids, ids], -1)[..., 0]
    if stack is not None:
        options |= {"adapters": stack, "adapter_ids": adapter_ids}
    return lambda: moe_ops.fused_experts(x, w13, w2, weights, ids, **options)


def backend_calls(name: str, variant: str, device: str) -> list[Call]:
    """Samples of a backend's op; of the tiered one, with all backends that take the call as
    tiers."""
    backend, kind = OF_BACKENDS[name]
    if backend is not auto.AUTO:
        try:
            return recorded(experts_call(kind, variant, device, backend.name), name)
        except ValueError as error:
            if backend.name not in ("triton", "torch") or "got scheme" in str(error):
                pytest.skip(str(error))
            raise
    machine = machines.machine(torch.device(device))

    def all_tiers(problem, machine, accepted):
        tiers = [
            b
            for b in backends.BACKENDS
            if variant not in QUANTIZED
            and can_run(b, device)
            and not plans._reasons(b, problem, machine)
        ]
        tiers = tiers if len(tiers) > 1 else [backends.named("torch")] * 2
        return tuple(zip([*range(2, 2 * len(tiers), 2), -1], tiers, strict=True))

    with pytest.MonkeyPatch.context() as patch, machines.pretend(machine):
        patch.setattr(plans, "_measured_tiers", all_tiers)
        return recorded(experts_call(kind, variant, device, "auto"), name)


def library_calls(name: str, variant: str, device: str) -> list[Call]:
    """Samples of the sizes and the dtype that kernels on matrix instructions take."""
    backend, kind = OF_BACKENDS[name]
    everything, sizes = variant == "everything", {"device": device, "dtype": torch.bfloat16}
    w13, w2 = torch.randn(E, 256, 128, **sizes), torch.randn(E, 128, 128, **sizes)
    if scheme := SCHEMES_OF_LIBRARIES[backend.name].get(variant):
        scale = torch.full((), 0.01, device=device) if scheme.endswith("static") else None
        w13, w2 = [moe_ops.quantize(w, scheme, activation_scale=scale) for w in (w13, w2)]
    options = {"backend": backend.name, "activation": "swigluoai" if everything else "silu"}
    w13 = moe_ops.prepare(w13, backend.name, activation=options["activation"])
    w2 = moe_ops.prepare(w2, backend.name)  # as they are, if the backend reads those
    weights = torch.rand(TOP_K, M, device=device).t()
    x = torch.randn(M, 256, **sizes)[:, :: 2 if everything else 1][:, :128]
    ids = torch.tensor([[0, 1], [2, 0], [-1, 2], [7, 0]], device=device)
    blocks, counts = torch.randn(E, M, 128, **sizes), torch.tensor([M, 0, 2], device=device)

    def call():
        if kind == "batched_experts":
            return moe_ops.batched_experts(blocks, w13, w2, counts, **options)
        return moe_ops.fused_experts(x, w13, w2, weights, ids, **options)

    if everything and kind == "experts":
        options["expert_map"] = torch.tensor([2, -1, 0, 1], device=device)
    try:
        return recorded(call, name)
    except ValueError as error:
        if not any(reason in str(error) for reason in NOT_TAKEN):
            raise  # a sample that no machine takes would test nothing
        pytest.skip(str(error))


def training_calls(name: str, variant: str, device: str) -> list[Call]:
    kind = "grouped_linear" if name.startswith("grouped") else "experts"
    adapted = name.startswith(("lora", "grouped_experts"))
    if name.startswith("grouped_experts"):
        kind = "grouped_experts"
    call = experts_call(kind, variant, device, "auto", training=True, adapted=adapted)
    return recorded(lambda: call().sum().backward(), name)


def gate_up_calls(name: str, variant: str, device: str) -> list[Call]:
    """Samples of gate and up rows that are a pair, or take turns."""
    size = {"device": device, "requires_grad": True}
    w13 = torch.randn(E, I, 2, K, **size)
    if variant == "plain":
        w13 = (torch.randn(E, I, K, **size), torch.randn(E, I, K, **size))
    x, w2 = torch.randn(M, K, device=device), torch.randn(E, K, I, device=device)
    counts = torch.tensor([2, 0, M - 2], device=device)  # all: what is kept of others is anything
    cast = torch.float64 if name.startswith("gate_up") else None

    def call():
        out = moe_ops.grouped_experts(x, w13, w2, counts, dtype=cast)
        out.sum().backward()

    return recorded(call, name)


def adapted_calls(name: str, variant: str, device: str) -> list[Call]:
    """Samples in which tokens have adapters of a stack: of w2 alone where weights are plain."""
    n, r = 2, 4
    sizes = ((r, K), (2 * I, r), (r, I), (K, r))
    matrices = [torch.randn(n, E, *size, device=device) for size in sizes]
    if variant == "plain":
        matrices[:2] = (None, None)
    stack = moe_ops.LoRAStack(*matrices, torch.tensor([0.5, 2.0], device=device))
    ids = torch.tensor([1, -1, 0, 7], device=device)[:M]
    found = []
    for backend in ("torch", "triton"):
        if can_run(backends.named(backend), device):
            of_tokens = {"stack": stack, "adapter_ids": ids}
            call = experts_call("experts", variant, device, backend, **of_tokens)
            found += recorded(call, name)
    return found


def route_calls(name: str, variant: str, device: str) -> list[Call]:
    """The op itself: public calls take it on CUDA alone."""
    experts = 8
    logits = torch.randn(M, 2 * experts, device=device)[:, ::2]
    bias = None if variant == "plain" else torch.randn(experts, device=device)
    scoring = "softmax" if variant == "plain" else "sigmoid"
    groups = (1, 1) if variant == "plain" else (4, 2)
    weights = torch.zeros(M, TOP_K, device=device)
    ids = torch.zeros(M, TOP_K, device=device, dtype=torch.int32)
    args = (weights, ids, logits, bias, scoring, True, *groups, 2.5)
    return [Call(torch.ops.moe_ops.route.default, args, {})]


SAMPLES = {name: (backend_calls, ("plain", "everything", "quantized")) for name in OF_BACKENDS}
SAMPLES |= {
    f"{name}_{kind}": (backend_calls, ("plain", "everything", *QUANTIZED))
    for kind in KINDS
    for name in ("torch", "triton")
}
SAMPLES |= {
    f"{name}_{kind}": (library_calls, ("plain", "everything", *schemes))
    for name, schemes in SCHEMES_OF_LIBRARIES.items()
    for kind in backends.named(name).operators
}
SAMPLES |= {
    "experts_forward": (training_calls, ("plain", "everything", *QUANTIZED)),
    "experts_backward": (training_calls, ("plain", "everything", *QUANTIZED)),
    "lora_experts_forward": (training_calls, ("plain", "everything", *QUANTIZED)),
    "lora_experts_backward": (training_calls, ("plain", "everything", *QUANTIZED)),
    "grouped_experts_forward": (training_calls, ("plain", "everything", *QUANTIZED)),
    "grouped_experts_backward": (training_calls, ("plain", "everything", *QUANTIZED)),
    "gate_up": (gate_up_calls, ("plain", "in turn")),
    "gate_up_backward": (gate_up_calls, ("plain", "in turn")),
    "grouped_pair_forward": (gate_up_calls, ("plain",)),
    "grouped_pair_backward": (gate_up_calls, ("plain",)),
    "adapted_experts": (adapted_calls, ("plain", "everything", *QUANTIZED)),
    "grouped_mm": (training_calls, ("plain", "everything", *QUANTIZED)),
    "grouped_outer": (training_calls, ("plain", "everything")),
    "route": (route_calls, ("plain", "everything")),
}


def can_run(backend, device: str) -> bool:
    """Whether a backend's kernels run on a device here: without a GPU those of torch, and Triton's
    in its interpreter.
    """
    if device == "cpu" and backend.name not in (auto.AUTO.name, "torch", "triton"):
        return False
    op = next(iter(backend.operators.values())).op
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), device.upper())
    return has_kernel and backend.library.available() is None


# --- the tests -----------------------------------------------------------------------------------


def test_every_op_has_samples():
    names = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_ops::")
    }
    names -= {"moe_ops::route_tokens"}  # tests/routing/test_tokens.py has its samples
    # it takes a quantized weight alone: tests/tensors/test_operations.py
    names -= {"moe_ops::part"}
    # they need a process group, or a GPU: tests/parallel/ranks.py compares what they return
    names -= {f"moe_ops::{op}" for op in ("symmetric_gather", "symmetric_reduce", "quantize_rows")}
    # operators cannot be taken back: other tests may have registered backends of their own
    ours = {f"moe_ops::{b}_{kind}" for b in ("auto", *moe_ops.list_backends()) for kind in KINDS}
    ours.add("moe_ops::adapted_experts")
    of_backends = {name for name in names if name.endswith(tuple(KINDS))}
    names -= of_backends - ours
    assert {name.removeprefix("moe_ops::") for name in names} == set(SAMPLES)
    for name in names:
        for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU")]
        ),
    ],
)
@pytest.mark.parametrize(
    ("name", "variant"), [(name, v) for name, (_, variants) in SAMPLES.items() for v in variants]
)
def test_opcheck(name, variant, device, monkeypatch):
    backend = OF_BACKENDS[name][0] if name in OF_BACKENDS else auto.AUTO
    if name == "route":
        backend = backends.named("triton")
    if not can_run(backend, device):
        pytest.skip(f"{backend.name} has no kernel for {device} here")
    calls = SAMPLES[name][0](name, variant, device)
    if variant not in ("plain", "everything", "in turn"):
        allow_eight_bits(monkeypatch)
    for op, args, kwargs in calls:
        results = opcheck(op, args, kwargs, test_utils=UTILITIES)
        assert set(results) == set(UTILITIES)
        if variant == "plain" and SAMPLES[name][0] in (training_calls, gate_up_calls):
            opcheck(op, pytree.tree_map_only(torch.Tensor, recording, args), kwargs)


def recording(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that requires grad where it may."""
    return tensor.clone().requires_grad_(tensor.is_floating_point())


def allow_eight_bits(monkeypatch) -> None:
    """test_schema compares arguments before and after by torch.allclose, which knows no e4m3."""
    allclose = torch.allclose

    def compare(one, other, **kwargs):
        if one.element_size() == 1 and one.is_floating_point():
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return allclose(one, other, **kwargs)

    monkeypatch.setattr(torch, "allclose", compare)


def test_opcheck_sees_a_kernel_that_writes_its_input(monkeypatch):
    """The comparison of quantized weights, put to the test: a launcher that flips a bit of w13."""
    allow_eight_bits(monkeypatch)
    ((op, args, kwargs),) = backend_calls("torch_experts", "quantized", "cpu")
    library = torch.library.Library("moe_ops_test", "FRAGMENT")
    library.define("faulty" + str(op._schema).split("torch_experts", 1)[1])

    def faulty(*values):
        op(*values)
        values[5].view(torch.uint8)[0, 0, 0] ^= 1

    library.impl("faulty", faulty, "CPU")
    with pytest.raises(Exception, match="w13"):
        opcheck(torch.ops.moe_ops_test.faulty.default, args, kwargs, test_utils="test_schema")
