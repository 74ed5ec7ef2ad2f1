"""Compile the Triton backend's kernels without a GPU and print what came out.

    python benchmarks/compile_kernels.py [--arch 90]

Registers, spilled bytes, shared memory, blocks resident per SM, tensor-core shapes and asynchronous copies
(`cp.async` by width: 16 bytes is what streams weights). Needs triton, not a GPU; TRITON_INTERPRET must be
unset.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_ops.kernels import triton_experts, triton_fp8, triton_routing, triton_scales, triton_tiles
from moe_ops.kernels.triton_launch import DEPENDENT_LAUNCH
from moe_ops.schemes import SCHEMES as NAMED

POINTERS = {
    **{torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"},
    **{torch.float8_e4m3fn: "*fp8e4nv", torch.uint8: "*u8"},
}
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
SCHEMES = tuple(NAMED)
SHAPES = {  # E, top_k, K, I
    "qwen3": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "gptoss20": (32, 4, 2880, 2880),
    "odd": (4, 2, 130, 70),
}


def compile_kernel(
    function, types: dict, constants: dict, divisible: tuple, ones: tuple, arch: int, warps: int
):
    """The compiled kernel; pointers and `divisible` arguments are multiples of 16, `ones` equal 1."""
    constants = {**constants, **{name: 1 for name in ones}}
    signature, attributes = {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name not in constants and (signature[name].startswith("*") or name in divisible):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})


def describe(kernel, warps: int) -> str:
    """One line of what the assembler made of a kernel."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True
        ).stdout
        sass = subprocess.run(
            [tools / "nvdisasm", "-c", file.name], capture_output=True, text=True
        ).stdout
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    shared = kernel.metadata.shared
    resident = min(
        65536 // (-(-registers * 32 // 256) * 256 * warps),
        228 * 1024 // (shared + 1024),
        64 // warps,
    )
    ptx = kernel.asm["ptx"]
    shapes = set(
        re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.(?:row\.col\.)?(m\d+n\d+k\d+)", ptx)
    )
    kind = "wgmma" if "wgmma" in ptx else "mma"
    kind += " e4m3" if re.search(r"mma[^;]*\.e4m3\.e4m3", ptx) else ""
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    copies = {
        width: len(re.findall(rf"LDGSTS\.E[A-Z.]*\.{width}\b", sass)) for width in ("64", "128")
    }
    return (
        f"registers {registers:3d}  spills {spills:3d}  shared {shared:6d}  blocks/SM {resident}  "
        f"{kind} {','.join(sorted(shapes)) or '-'}  cp.async {len(re.findall('LDGSTS', sass))} "
        f"(16 B: {copies['128']}, 8 B: {copies['64']})  "
        f"LDG {len(re.findall(r'LDG.E', sass))}  shuffles {len(re.findall(r'SHFL', sass))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, choices=sorted(SHARED_MEMORY))
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    parser.add_argument("--scheme", choices=SCHEMES, action="append")
    parser.add_argument("--M", type=int, action="append")
    parser.add_argument("--transposed", action="store_true", help="weights stored (E, K, N)")
    parser.add_argument("--activation", default="silu")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    arch = arguments.arch
    print(f"triton {triton.__version__}, sm_{arch}")
    for shape in arguments.shape or SHAPES:
        for scheme in arguments.scheme or SCHEMES:
            for dtype in (torch.bfloat16, torch.float32)[: 1 if scheme else 2]:
                for M in arguments.M or (1, 8, 64, 256, 1024, 4096):
                    options = (arguments.activation, arguments.transposed)
                    report(shape, dtype, M, arch, *options, scheme)
    for tile, chunk in ((16, 1024), (128, 4096)):
        for has_map in (False, True):
            warps = 4 if chunk == 1024 else 8
            kernel = compile_kernel(
                triton_routing.moe_ops_route,
                {"index_ptr": "*i32", "ids_ptr": "*i64", "map_ptr": "*i32"},
                {"EP": 128, "TILE": tile, "CHUNK": chunk, "HAS_MAP": has_map, "DEPENDENT": False}
                | ({} if has_map else {"map_ptr": None}),
                (),
                (),
                arch,
                warps,
            )
            print(f"route tile {tile} map {has_map}: {describe(kernel, warps)}")
    kernel = compile_kernel(
        triton_experts.moe_ops_combine,
        {"out_ptr": "*bf16", "y_ptr": "*fp32", "ids_ptr": "*i32", "topk_weights_ptr": "*fp32"},
        {
            "map_ptr": None,
            "TOP_K": 8,
            "HAS_MAP": False,
            "WEIGHTED": True,
            "BN": 512,
            "DEPENDENT": False,
        },
        ("K", "stride_om"),
        ("stride_ok",),
        arch,
        4,
    )
    print(f"combine: {describe(kernel, 4)}")
    report_quantizing(arch)


def report(
    shape: str,
    dtype: torch.dtype,
    M: int,
    arch: int,
    activation: str,
    transposed: bool,
    scheme: str,
) -> None:
    """Compile the two GEMMs of a shape at M tokens and print a line each."""
    E, top_k, K, I = SHAPES[shape]  # noqa: E741
    gated = not activation.endswith("_no_mul")
    scales = triton_scales.scales(scheme)
    memory = SHARED_MEMORY[arch]
    tiles = triton_tiles.choose(M * top_k, E, K, I, dtype.itemsize, M == 1, memory, *scales, gated)
    native, dependent = arch >= 89, arch >= 90 and DEPENDENT_LAUNCH
    codes = torch.float8_e4m3fn if native else torch.uint8
    h_codes = scales.x == "static" or (scales.x == "group" and not tiles.wide_h)
    h_dtype = codes if h_codes else torch.float32 if scales.x else dtype
    h_scale = "" if scales.x == "group" and tiles.wide_h else scales.x
    types = {"ids_ptr": "*i32", "index_ptr": "*i32", "topk_weights_ptr": "*fp32"}
    types |= {name: "fp32" for name in ("alpha", "beta", "limit")}
    strides = ("stride_we", "stride_xm", "stride_ym")
    inner, outer = ("stride_wk", "stride_wn") if not transposed else ("stride_wn", "stride_wk")
    shared = {"ROWS": "direct" if tiles.direct else "sorted", "HAS_MAP": False, "HAS_BIAS": False}
    shared |= {
        "GROUP": triton_tiles.GROUP,
        "DEPENDENT": dependent,
        "BM": tiles.tokens,
        "map_ptr": None,
        "bias_ptr": None,
    }
    for name, tile, depth, width in (("gemm1", tiles.gemm1, K, I), ("gemm2", tiles.gemm2, I, K)):
        columns = tile.rows // 2 if gated and name == "gemm1" else tile.rows
        constants = shared | {"WN": tile.rows, "BK": tile.k, "STAGES": tile.stages}
        constants |= {"EVEN_K": depth % tile.k == 0, "EVEN_N": width % columns == 0}
        x_dtype = h_dtype if name == "gemm2" else codes if tiles.quantize else dtype
        pointers = {"w_ptr": POINTERS[codes if scheme else dtype], **types}
        pointers |= {"x_ptr": POINTERS[x_dtype], "w_scale_ptr": "*fp32", "x_scale_ptr": "*fp32"}
        constants |= {"W_SCALE": scales.weight, "X_SCALE": scales.x, "NATIVE": native}
        constants |= {"PARTS": triton_scales.PARTS if scales.x == "tensor" else 1}
        ones = ("stride_xk", inner, *("stride_sk",) * (scales.weight == "block"))
        if name == "gemm1":
            pointers |= {"h_ptr": POINTERS[h_dtype], "h_scale_ptr": "*fp32"}
            constants |= {"H_SCALE": h_scale}
            constants |= {
                "WEIGHT_ON_INPUT": False,
                "topk_weights_ptr": None,
                "ACTIVATION": activation.removesuffix("_no_mul").removesuffix("_uninterleave"),
                "GATED": gated,
                "INTERLEAVED": activation == "swigluoai",
                "HAS_LIMIT": activation.startswith("swiglu"),
            }
            even = ("K",) * (K % 16 == 0) + ("I",) * (I % 16 == 0) + ("stride_xe",)
        else:
            pointers["y_ptr"] = "*fp32"
            constants |= {"ZERO_TAIL": False, "PREFETCH": 2048 if dependent else 0}
            even = ("K",) * (I % 16 == 0) + ("N",) * (K % 16 == 0) + ("stride_ye",)
            ones += ("stride_yn",)
        if K % 16 == 0 and I % 16 == 0:
            even += (*strides, outer)
        kernel = compile_kernel(
            getattr(triton_experts, f"moe_ops_{name}"),
            pointers,
            constants,
            even,
            ones,
            arch,
            tile.warps,
        )
        print(
            f"{shape} {scheme or str(dtype)[6:]} M={M} {name} {tiles.tokens} x {tile.rows} x {tile.k} x {tile.stages}"
            f" warps {tile.warps}: {describe(kernel, tile.warps)}",
            flush=True,
        )


def report_quantizing(arch: int) -> None:
    """Compile the kernels that prepare activations and print a line each."""
    native, dependent = arch >= 89, arch >= 90 and DEPENDENT_LAUNCH
    pointers = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv" if native else "*u8"}
    pointers |= {"scale_ptr": "*fp32", "zero_ptr": "*fp32", "parts_ptr": "*fp32"}
    pointers |= {"ids_ptr": "*i32", "map_ptr": "*i32", "topk_weights_ptr": "*fp32"}
    even = ("K", "stride_xe", "stride_xm")
    for by_group in (True, False):
        constants = {"BY_GROUP": by_group, "GROUPS": 16, "NATIVE": native, "DEPENDENT": dependent}
        constants |= {"zero_ptr": None} if by_group else {}
        function = triton_fp8.moe_ops_quantize
        kernel = compile_kernel(function, pointers, constants, even, ("stride_xk",), arch, 4)
        print(f"quantize by {'group' if by_group else 'row'}: {describe(kernel, 4)}")
    for valid in ("pairs", "batched", "groups"):
        constants = {"VALID": valid, "HAS_MAP": valid == "pairs", "WEIGHT_ON_INPUT": False}
        constants |= {"LANES": 8, "CHUNK": 1024, "DEPENDENT": dependent, "topk_weights_ptr": None}
        constants |= {} if valid == "pairs" else {"map_ptr": None}
        constants |= {"zero_ptr": None} if valid == "groups" else {}
        function = triton_fp8.moe_ops_amax
        kernel = compile_kernel(function, pointers, constants, even, ("stride_xk",), arch, 4)
        print(f"amax of {valid}: {describe(kernel, 4)}")


if __name__ == "__main__":
    main()
