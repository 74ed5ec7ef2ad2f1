"""Backend `cutlass`: grouped GEMMs on CUTLASS 3.x collectives, in C++ (csrc/cutlass), between
fused kernels of our own (layer.py).

On SM90 it runs plain bf16 weights, and e4m3 weights with one scale or one for each row, beside
e4m3 activations with one scale, known or dynamic, or one for each token, or with scales of blocks
and of groups (fp8_block). There it also runs int4
weights with scales of groups beside e4m3 tokens (int4_w4a8), and on SM100 and SM120 nvfp4, mxfp4
and mxfp8, whose scales the tensor cores apply: those of SM100 and SM120 were compiled and
simulated, not run on hardware. Weights of both are prepared: `moe_ops.prepare(weight, "cutlass")`.
"""

from __future__ import annotations

import torch

from moe_ops import environment
from moe_ops.backend import (
    Backend,
    Buffer,
    Exchanges,
    Lazy,
    Library,
    Machine,
    Problem,
    Takes,
    Workspaces,
    register,
    round_up,
)
from moe_ops.backends.cutlass import library
from moe_ops.backends.cutlass.relayout import LAYOUT_OF_KIND, RELAYOUTS
from moe_ops.backends.cutlass.schemes import (
    ACTIVATIONS,
    BLOCK_SCALED,
    BLOCKS,
    CAPABILITIES,
    GROUPS,
    INT4,
    INT4_GROUP,
    INT4_SCHEME,
    PLAIN,
    SCHEMES_OF_GROUPS,
    SCHEMES_OF_ROWS,
    ends_products,
    grouped_bytes,
    kind_of,
    parts,
    scale_rows,
)
from moe_ops.environment import INTERPRETED
from moe_ops.kernels.place.layout import index_parts

_FP8 = SCHEMES_OF_ROWS
BLOCK = 128  # columns that share a scale in GROUPS
_MULTIPLE = 16  # of K and I: rows of e4m3 begin at multiples of 16 bytes


def available() -> str | None:
    """None, or what to install."""
    return library.why_not() or environment.why_no_triton()


def _multiple(scheme: str, kind: str) -> int:
    """What K and I must be a multiple of, so that rows and scales begin where instructions read
    them: CUTLASS does not check that when sizes are on the device.
    """
    if kind == PLAIN:
        return 8
    if kind == BLOCKS:
        return BLOCK_SCALED[scheme].multiple
    return INT4_GROUP if kind == INT4 else _MULTIPLE


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty if it can."""
    p, reasons = problem, []
    kind = kind_of(p.scheme)
    if kind is None:
        return [f"cutlass has no kernel for scheme {p.scheme!r}"]
    known, scheme = CAPABILITIES[kind], p.scheme or "plain weights"
    if machine.device_type != "cuda" and not (INTERPRETED and library.simulated()):
        reasons.append(f"cutlass needs a CUDA device, got {machine.device_type}")
    elif machine.gfx:
        reasons.append(f"cutlass needs an NVIDIA GPU, got {machine.gfx}")
    elif machine.device_type == "cuda" and machine.capability not in known:
        wanted = " and ".join([f"{major}.{minor}" for major, minor in known])
        major, minor = machine.capability
        reasons.append(
            f"cutlass has kernels of {scheme} for compute capability {wanted}, got {major}.{minor}"
        )
    narrow = kind in (PLAIN, GROUPS, BLOCKS)
    dtypes = (torch.bfloat16,) if narrow else (torch.bfloat16, torch.float16)
    if p.dtype not in dtypes:
        takes = " or ".join([str(dtype).removeprefix("torch.") for dtype in dtypes])
        of = f" with {scheme}" if narrow else ""
        reasons.append(f"cutlass takes {takes} hidden_states{of}, got {p.dtype}")
    multiple = _multiple(p.scheme, kind)
    for name, size in (("K", p.hidden_size), ("I", p.intermediate_size)):
        if size % multiple:
            reasons.append(f"cutlass needs {name} to be a multiple of {multiple}, got {size}")
    if kind == GROUPS and p.options.activation is not None:
        if not p.options.activation.gated:
            reasons.append(f"cutlass runs {scheme} with gated activations alone")
        elif not ends_products(p.options.activation):
            names = ", ".join(ACTIVATIONS)
            reasons.append(
                f"cutlass ends products with activations {names}, got "
                f"{p.options.activation.name!r}"
            )
        elif not p.options.activation.interleaved and p.intermediate_size % (BLOCK // 2):
            reasons.append(
                f"cutlass needs I to be a multiple of {BLOCK // 2} with gate and up in halves, "
                f"got {p.intermediate_size}: a half would end in the middle of a block"
            )
    if not (p.contiguous_weights or (kind == PLAIN and p.transposed_weights)):
        reasons.append(
            "cutlass needs contiguous weights and scales; call .contiguous() on them once"
        )
    if p.has_bias and kind not in (PLAIN, GROUPS):
        reasons.append(f"cutlass takes no bias with {scheme}; use backend='triton' or 'auto'")
    if "w2" in p.global_rows:
        reasons.append(
            "cutlass takes w2 with a global scale for each expert, got one for each row; use "
            "backend='torch' or 'auto'"
        )
    if narrow and p.kind != "experts":
        reasons.append(f"cutlass runs {scheme} in fused_experts alone, got {p.kind}")
    layout = LAYOUT_OF_KIND.get(kind, "")
    if layout and p.layout != layout:
        reasons.append(
            f"cutlass takes {p.scheme} weights in layout {layout!r}, got {p.layout!r}: once "
            "call moe_ops.prepare(w13, 'cutlass') and moe_ops.prepare(w2, 'cutlass')"
        )
    if p.layout and not layout:
        reasons.append(
            f"cutlass takes weights in their natural layout, got {p.layout!r}; "
            "moe_ops.prepare(weight, 'torch') brings it back"
        )
    return reasons


def plain_ends_activated(problem: Problem) -> bool:
    """Whether the product with plain w13 ends with the activation, as layer.py runs it: gate and
    up rows of a weight that is stored transposed do not lie in rows.
    """
    p = problem
    of = p.options.activation
    return of is not None and ends_products(of) and p.contiguous_weights


def workspace_shapes(M: int, problem: Problem) -> Workspaces:
    """Shapes of the workspaces. workspace13 holds quantized x (rows, K), then the activation's
    output h (rows, I), each followed by its scales: one for each row, or those of blocks in tiles;
    workspace2 gate and up (rows, N), then the products with w2 (rows, K). The index workspace:
    kernels/place/layout.py, then schemes.Parts. Of plain weights all are bf16 without scales.
    Where the first product ends with the activation, workspace2 holds its output alone, and
    workspace13 the rest; so it is of GROUPS.
    """
    p = problem
    E, rows = p.num_experts, M * p.top_k
    index = index_parts(rows, E).end
    if p.kind == "batched_experts":
        rows, index = E * M, E
    wide = max(p.hidden_size, p.intermediate_size)
    kind = kind_of(p.scheme)
    assert kind is not None
    if kind == PLAIN:
        ends_activated = plain_ends_activated(p)
        second = p.intermediate_size if ends_activated else max(p.num_rows, p.hidden_size)
        return Workspaces(
            Buffer((rows, p.hidden_size if ends_activated else wide), p.dtype),
            Buffer((rows, second), p.dtype),
            Buffer((index,), torch.int32),
        )
    if kind == GROUPS:
        I = p.intermediate_size
        # bf16 rows (rows, K), or as many of e4m3: their scales take no more than the other half,
        # of which up to 127 bytes are for their alignment
        return Workspaces(
            Buffer((2 * rows * p.hidden_size + 128,), torch.uint8),
            Buffer((grouped_bytes(rows, I),), torch.uint8),
            Buffer((index,), torch.int32),
        )
    if kind == BLOCKS:
        size = BLOCK_SCALED[p.scheme].operand_bytes(rows, scale_rows(M, p.top_k, E), wide)
    else:
        size = round_up(rows * wide, 128) + 4 * rows
    return Workspaces(
        Buffer((size,), torch.uint8),
        Buffer((rows, max(p.num_rows, p.hidden_size)), p.dtype),
        Buffer((parts(index, E, kind).end,), torch.int32),
    )


def depends_on_batch(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why a token's row may differ from that of `triton`, whose kernels run fewer rows:
    products, the activation and the weighted sum take the same steps in the same order where
    there are none.
    """
    p, reasons = problem, []
    if p.scheme not in ("", "fp8_block"):
        reasons.append(f"cutlass is not shown to give triton's bits with scheme {p.scheme!r}")
    if p.has_bias:
        reasons.append("cutlass adds biases after it has rounded the products with w2")
    if p.options.router_weight_on_input:
        reasons.append("cutlass rounds hidden_states after router weights scaled them")
    if p.options.activation is not None and not plain_ends_activated(p):
        reasons.append(
            "cutlass rounds the products with w13 before their activation, unless that is gated, "
            "one of its own, and weights are contiguous"
        )
    if p.options.activation is not None and p.options.activation.name == "gelu":
        reasons.append("cutlass computes erf of gelu by other instructions")
    return reasons


BACKEND = register(
    Backend(
        "cutlass",
        supports=supports,
        workspace_shapes=workspace_shapes,
        launch={
            "experts": Lazy("moe_ops.backends.cutlass.layer:experts"),
            "batched_experts": Lazy("moe_ops.backends.cutlass.layer:batched_experts"),
        },
        devices=("CUDA",),
        library=Library(available=available, interpreted=INTERPRETED, unbuilt=library.unbuilt),
        takes=Takes(
            native_schemes=(*_FP8, *SCHEMES_OF_GROUPS, INT4_SCHEME, *BLOCK_SCALED),
            native_capability=(9, 0),
            quantized_input=(*_FP8, *SCHEMES_OF_GROUPS, INT4_SCHEME),
            chunked=True,
            depends_on_batch=depends_on_batch,
        ),
        exchanges=Exchanges(adds_ranks=True, sends_rows=("", *SCHEMES_OF_GROUPS)),
        relayouts=RELAYOUTS,
    )
)
