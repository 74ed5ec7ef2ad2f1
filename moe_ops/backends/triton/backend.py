"""Backend `triton`: every scheme on any NVIDIA GPU from SM80 on, bf16, fp16 or fp32 activations;
on AMD's gfx942 plain weights and those whose activations are quantized to e4m3 or int8.

If a scheme quantizes activations to a format of which no GPU up to SM90 has products, they are
rounded and multiplied in a wider type: kernels/rows/emulated.py. Of known activation scales
that differ by expert, each pair has that of its expert, but of nvfp4 all have the largest, because
a token is rounded once.

A layer takes four launches: route (none for one token), GEMM1 with the activation in its
epilogue, GEMM2, and combine; one more may quantize activations. One token takes two launches, with
plain or block-scaled weights (kernels/gemm/gemv.py), and with weights of 4 and 8 bits
(kernels/mixed_gemm/gemv.py; of some formats of 4 bits kernels/mixed_gemm/sm90_mma.py). With the
latter, more tokens take five launches on SM90, or four if they are few
(kernels/mixed_gemm/sm90_wgmma.py), and where experts have many rows seven (sm90_packed.py there).
Under `batch_invariant` one token takes those of more, or with 4 bits and short rows the two of
sm90_mma.py. Where w13 and w2 have different schemes
(two_schemes.py), each product is that of its own.

Nothing is allocated, and the host reads no device memory. On a machine without a GPU the kernels
run under Triton's interpreter, if TRITON_INTERPRET=1 was set before this import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_ops import environment
from moe_ops.backend import (
    AdaptedArgs,
    Adapts,
    Backend,
    Buffer,
    Exchanges,
    Lazy,
    Library,
    Machine,
    Problem,
    Takes,
    Workspaces,
    cdiv,
    maximum,
    register,
    round_up,
)
from moe_ops.backends.triton.relayout import RELAYOUTS
from moe_ops.kernels.configs import MOST_SHARES, SMALLEST_BLOCK_M, block_bound
from moe_ops.kernels.launch import INTERPRETED, NATIVE_CAPABILITY
from moe_ops.kernels.mixed_gemm import configs as mixed_configs
from moe_ops.kernels.mixed_gemm import operands
from moe_ops.kernels.rows import rounding, scales
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.ops.library import KINDS
from moe_ops.schemes import SCHEMES, get_scheme

_BACK = "moe_ops.prepare(weight, 'torch') brings it back"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_QUANTIZING = (
    *("fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_channel_tensor"),
    *("fp8_channel_tensor_static", "fp8_block", "fp8_block:ue8m0"),
    *("int8_w8a8", "int8_w8a8_tensor", "int8_w8a8_static"),
)


def _decoded(name: str) -> bool:
    """Whether the kernels decode activations of an emulated scheme: elements of 8 and 4 bits."""
    activation = SCHEMES[name].activation
    return name in _MIXED_SCHEMES and activation is not None and activation.format.bits != 6


_MIXED_SCHEMES = frozenset(filter(operands.describe, SCHEMES))
# AMD's GPUs for which tools/compile_matrix.py compiles the kernels; none was run on hardware
AMD_GPUS = ("gfx942",)
WITH_KERNELS = frozenset(("", *_QUANTIZING, *_MIXED_SCHEMES))
_NATIVE = (*_QUANTIZING, *sorted(name for name in _MIXED_SCHEMES if SCHEMES[name].weight_only))


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty if it can."""
    reasons = []
    if machine.device_type != "cuda" and not (machine.device_type == "cpu" and INTERPRETED):
        reasons.append(f"triton needs a CUDA device, got {machine.device_type}")
    elif machine.gfx:
        reasons += _reasons_against_amd(problem, machine.gfx)
    elif machine.device_type == "cuda" and machine.capability < (8, 0):
        major, minor = machine.capability
        reasons.append(f"triton needs compute capability 8.0 or higher, got {major}.{minor}")
    for scheme in problem.schemes:
        if scheme not in SCHEMES:
            reasons.append(
                f"triton runs the named schemes, got {scheme!r}; use backend='torch' or 'auto'"
            )
            return reasons
    w13, w2 = problem.schemes
    quantizing = [name for name in (w13, w2) if get_scheme(name).activation is not None]
    if w13 != w2 and quantizing:
        reasons.append(
            "triton runs two schemes in one layer where neither quantizes activations, got "
            f"{quantizing[0]!r}; use backend='torch' or 'auto'"
        )
    for scheme in {w13: None, w2: None}:
        if scheme not in WITH_KERNELS:
            dtype = SCHEMES[scheme].quantized_weight.dtype
            reasons.append(
                f"triton has no kernels for weights of {dtype}, got {scheme!r}; backend 'torch' "
                "dequantizes such weights"
            )
    if _needs_newer_triton(problem, machine):
        major, minor = machine.capability
        reasons.append(
            f"triton cannot compile scheme {problem.scheme!r} for compute capability "
            f"{major}.{minor} under Triton {machine.triton}, Triton 3.8 or later can"
        )
    if problem.layout == TRITON_E2M1:
        reasons += _reasons_against_e2m1_words(problem, machine)
    elif problem.layout:
        reasons.append(
            f"triton takes weights in their natural layout or in {TRITON_E2M1!r}, got "
            f"{problem.layout!r}; {_BACK}"
        )
    if problem.activation_by_expert and (w13 != w2 or problem.layout):
        reasons.append(
            "triton takes parameters of the activation by expert beside weights of one scheme in "
            "their natural layout"
        )
    if problem.dtype not in _DTYPES:
        reasons.append(f"triton takes bfloat16, float16 or float32, got {problem.dtype}")
    return reasons


def depends_on_batch(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why a token's row may depend on its batch. Under `Options.batch_invariant` calls run
    the kernels of sm80_mma.py and sm90_tma.py and, with narrow weights on SM90, of sm90_wgmma.py
    and sm90_mma.py, with tiles that the number of rows has no part in unless all give the same
    bits. y of plain kernels has the tokens' dtype.
    """
    reasons = []
    if problem.layout:
        reasons.append(
            f"triton is not batch invariant with weights in layout {problem.layout!r}, whose "
            f"kernels are chosen by the number of tokens; {_BACK}"
        )
    if machine.gfx:
        reasons.append(f"triton is not shown to be batch invariant on {machine.gfx}")
    if problem.activation_by_expert:
        reasons.append(
            "triton is not shown to be batch invariant with parameters of the activation by expert"
        )
    return reasons


def _reasons_against_amd(problem: Problem, gfx: str) -> list[str]:
    """Why an AMD GPU cannot run a problem: its kernels are those without PTX."""
    reasons = []
    if gfx not in AMD_GPUS:
        known = " and ".join(AMD_GPUS)
        reasons.append(f"triton's kernels were compiled for {known} of AMD's GPUs, got {gfx}")
    if not _MIXED_SCHEMES.isdisjoint(problem.schemes):
        reasons.append(
            f"triton's kernels for schemes other than {', '.join(_QUANTIZING)} hold PTX, which "
            f"needs an NVIDIA GPU, got {gfx}"
        )
    return reasons


def _needs_newer_triton(problem: Problem, machine: Machine) -> bool:
    """Whether Triton's compiler, before 3.8, fails for SM100: if GEMM1 ends with one maximum of
    all its outputs. A version that nobody knows is not refused.
    """
    if machine.device_type != "cuda" or machine.capability[0] != 10 or INTERPRETED:
        return False
    schemes = ("fp8_tensor", "fp8_channel_tensor", "int8_w8a8_tensor", "nvfp4")
    one_maximum = problem.scheme in schemes and problem.kind != "grouped_linear"
    return one_maximum and (0, 0) != environment.release(machine.triton) < (3, 8)


def _reasons_against_e2m1_words(problem: Problem, machine: Machine) -> list[str]:
    """Why weights prepared for this backend cannot run. The kernels without tensor cores and those
    of SM90 read them.
    """
    reasons = []
    if not all([get_scheme(name).e2m1_weight_only for name in problem.schemes]):
        reasons.append(
            f"triton takes layout {TRITON_E2M1!r} of e2m1 weights beside 16-bit activations, got "
            f"scheme {problem.scheme!r}; {_BACK}"
        )
    if problem.kind != "experts":
        reasons.append(
            f"triton takes weights in layout {TRITON_E2M1!r} in fused_experts alone; {_BACK}"
        )
    if machine.device_type != "cuda":
        return reasons
    if problem.dtype != torch.bfloat16:
        reasons.append(
            f"triton takes bfloat16 beside weights in layout {TRITON_E2M1!r}, got "
            f"{problem.dtype}; {_BACK}"
        )
    if machine.capability[0] != 9 or INTERPRETED or environment.why_no_gluon(machine.triton):
        major, minor = machine.capability
        found = "its interpreter" if INTERPRETED else f"Triton {machine.triton or None}"
        reasons.append(
            f"triton takes weights in layout {TRITON_E2M1!r} on compute capability 9.0 under "
            f"Triton {environment.GLUON_VERSIONS}, got {major}.{minor} under {found}; {_BACK}"
        )
    return reasons


def workspace_shapes(M: int, problem: Problem) -> Workspaces:
    """Shapes of the workspaces. workspace13 holds the activation's output h (rows, I; for mixed
    GEMMs in whole chunks) in the input's dtype, workspace2 its product with w2, y (M * top_k, K),
    in fp32 or less, and the index workspace the table of blocks (.., 4) and the order of pairs.
    Where experts have many rows (kernels/mixed_gemm/sm90_packed.py), workspace2 holds counts of
    experts, then rows of x, then y in the input's dtype, and the index also the end rows of
    experts.

    If activations are quantized, workspace13 holds h and its scales, and workspace2 first
    quantized x and its scales, then y. If that is emulated, workspace13 holds h in fp32, and after
    it rounded h.

    With slots y follows x in workspace2 (pipeline/gathered.py).

    M is T for batched_experts, and S for grouped_linear, which writes `out` directly and has no
    intermediate rows.
    """
    experts, K, I = problem.num_experts, problem.hidden_size, problem.intermediate_size
    h, x, y, rows = 0, 0, 0, M
    scheme = problem.schemes[0]  # where w2 has another, neither quantizes activations
    mixed = any([operands.describe(name) is not None for name in problem.schemes])
    block_m = mixed_configs.SMALLEST_BLOCK_M if mixed else SMALLEST_BLOCK_M
    slots = problem.options.slots > 0
    if problem.kind == "experts":
        pairs = M * problem.top_k
        h, y = pairs, pairs * K
        index = 4 * block_bound(pairs, experts, block_m) + pairs
        if mixed:  # the end rows of experts and one block more: kernels/mixed_gemm/sm90_packed.py
            index = index + round_up(experts, 4) + 8
    elif problem.kind == "batched_experts":
        h = rows = experts * M
        index = 4 * experts * cdiv(M, block_m)
    else:
        index = 4 * block_bound(M, experts + 1, block_m)
    rounded = rounding.describe(scheme) if mixed else None
    x_scale = "" if mixed else scales.describe(scheme).x
    if rounded is not None:
        columns, x = I, rounding.x_elements(rows, K, rounded)
        if problem.kind == "experts" and rounded.SCALE == "row":  # sm90_wgmma.py takes these
            columns = mixed_configs.padded(I)
            y = mixed_configs.y_rows(pairs) * K
            x = maximum(x, mixed_configs.permuted_elements(pairs, K) + pairs)
        hidden = Buffer((rounding.h_elements(h, columns, rounded),), torch.float32)
    elif x_scale:
        elements = scales.h_elements(h, I, experts, x_scale, K % 16 == I % 16 == 0)
        hidden = Buffer((elements,), torch.float32)
        if x_scale == "tensor" or not problem.quantized_input:
            x = scales.x_elements(rows, K, x_scale)
    else:
        columns = I
        if mixed and problem.kind == "experts":
            columns = mixed_configs.padded(I)
            y = mixed_configs.y_rows(pairs) * K
            x = mixed_configs.permuted_elements(pairs, K) if slots else 0
        elements = h * columns
        if mixed and scheme == "":  # h of a plain w13, and after it h with permuted columns
            elements = round_up(elements, mixed_configs.ALIGNMENT) + elements
        hidden = Buffer((elements,), problem.dtype)
    if slots:  # x of a pass is written when y has rows of those before
        y = y + round_up(x, 32)
    elif x_scale == "tensor":  # the one scale of all tokens outlives the products of a chunk
        y = y + x
    else:
        y = maximum(y, x)
    if rounded is not None and rounded.SCALE == "nv":
        y = y + scales.SHARED
    return Workspaces(hidden, Buffer((y,), torch.float32), Buffer((index,), torch.int32))


def missing_kernels(problem: Problem, machine: Machine) -> list[str]:
    """Why the SM90 kernels for weights of 4 to 8 bits are left out of a layer that they serve."""
    if problem.kind != "experts" or machine.capability[0] != 9:
        return []
    forms = [form for form in map(operands.describe, problem.schemes) if form is not None]
    if not forms or any([form.name not in mixed_configs.FORMATS for form in forms]):
        return []
    rounded = rounding.describe(problem.schemes[0])  # activations as these kernels take them
    if rounded is not None and rounded.SCALE != "row":
        return []
    if (problem.dtype if rounded is None else rounded.dtype) != torch.bfloat16:
        return []
    reason = environment.why_no_gluon(machine.triton)
    return [] if reason is None else [reason]


def adapter_elements(M: int, problem: Problem, ranks: tuple[int, int]) -> int:
    """fp32 elements of the workspace of adapters of tokens: those that are made narrow, a few sums
    of each, and what is added before the activation (kernels/gemm/token_adapters.py and
    pair_adapters.py there).
    """
    pairs = M * problem.top_k
    added = cdiv(pairs * problem.num_rows * problem.dtype.itemsize, 4) if ranks[0] else 0
    return MOST_SHARES * pairs * max(ranks) + added


def why_not_adapted(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why tokens of a problem that runs here may not have adapters."""
    w13, w2 = problem.schemes
    if w13 != w2:
        return ["triton adds adapters of tokens where w13 and w2 have one scheme"]
    return []


_PLAIN = {kind: Lazy(f"moe_ops.backends.triton.plain:{kind}") for kind in KINDS}
_MIXED = {kind: Lazy(f"moe_ops.backends.triton.mixed:{kind}") for kind in KINDS}
_TWO = {
    kind: Lazy(f"moe_ops.backends.triton.two_schemes:{kind}")
    for kind in ("experts", "batched_experts")
}


def _launch(kind: str) -> Callable:
    """The launcher of a kind of call, which depends on the scheme."""
    plain, mixed = _PLAIN[kind], _MIXED[kind]
    two = _TWO.get(kind, mixed)

    def launch(args: Any, passes: Any = None) -> None:
        scheme = args.scheme
        run = mixed if scheme in _MIXED_SCHEMES else plain if scheme in SCHEMES else two
        run(args) if passes is None else run(args, passes)

    return launch


_plain_adapted, _mixed_adapted = [
    Lazy(f"moe_ops.backends.triton.{file}:adapted_experts") for file in ("plain", "mixed")
]


def _launch_adapted(args: AdaptedArgs) -> None:
    launch = _mixed_adapted if args.scheme in _MIXED_SCHEMES else _plain_adapted
    launch(args)


BACKEND = register(
    Backend(
        "triton",
        supports=supports,
        workspace_shapes=workspace_shapes,
        launch={kind: _launch(kind) for kind in KINDS},
        devices=("CUDA",),
        library=Library(
            available=environment.why_no_triton,
            distribution="triton",
            interpreted=INTERPRETED,
            missing_kernels=missing_kernels,
        ),
        takes=Takes(
            native_schemes=_NATIVE,
            native_capability=NATIVE_CAPABILITY,
            quantized_input=tuple([*_QUANTIZING, *filter(_decoded, SCHEMES)]),
            two_schemes=True,
            chunked=True,
            resident_on=("cuda", "cpu"),
            passes=_launch("experts"),
            adapts=Adapts(_launch_adapted, adapter_elements, why_not_adapted),
            activation_by_expert=True,
            depends_on_batch=depends_on_batch,
        ),
        exchanges=Exchanges(adds_ranks=True),
        relayouts=RELAYOUTS,
    )
)
