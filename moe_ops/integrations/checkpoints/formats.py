"""The quantized formats of checkpoints: what their tensors are called, and what they become here.

A matrix of a checkpoint is a set of tensors, each in one role: what follows the matrix's name,
e.g. "qweight" of ``experts.3.up_proj.qweight`` or "blocks" of ``experts.gate_up_proj_blocks``. A
`Format` looks at names, dtypes and shapes alone (`describe`), so that a whole checkpoint is
checked before any weight is read, and turns the tensors into those of an ExpertTensor (`convert`).
Neither changes the value of any element: integers and floats are moved to other places, scales are
widened to fp32 where moe_ops wants that, and a global scale that multiplies becomes one that
divides.

Dimensions: N rows (outputs), K columns (inputs), g columns of one scale group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import bitsandbytes, floats, ggml, integers, mlx
from moe_ops.integrations.checkpoints.common import FLOATS, Config, Matrix
from moe_ops.schemes import GGUF_TYPES


@dataclass(frozen=True)
class Format:
    """One way to store a quantized matrix.

    ``describe`` takes the tensors by role (all that have dtype and shape will do) and the
    checkpoint's quantization_config; it raises ValueError where they contradict each other or ask
    for what moe_ops cannot compute. ``convert`` returns the arguments of `from_quantized` for this
    matrix.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    describe: Callable[[dict, Config], Matrix]
    convert: Callable[[dict[str, Tensor], Config], dict[str, Tensor]]
    dtypes: tuple[torch.dtype, ...] = ()  # of "weight", where the names do not tell
    tells: bool = False  # its tensors alone do: the configuration is in words of its own
    method: str = ""  # quant_method of its configurations, which do not say it
    methods: tuple[str, ...] = ()  # whose configurations can mean it
    # why a stack cannot be read for a model that keeps (E, K, N), of which the shapes do not tell
    # whether columns come first; {} is its dtype
    turned: str = ""
    blocks: str = ""  # of ggml: the type of those that "weight" is
    state: str = ""  # role of a tensor that is a JSON object, the matrix's configuration


_PLAIN = "; load the plain checkpoint with MoeOpsConfig(scheme)"
_UNKNOWN = (
    "must hold experts one by one, pairs of e2m1, or in ModelOpt's files e4m3 with a scale for "
    "each expert or for all, got a stack of {} for a model that keeps columns before rows: of "
    f"others nothing says which of the two the file has{_PLAIN}"
)
_GROUPS_OF_ROWS = (
    "must not be a stack of ModelOpt's MXFP4 for a model that keeps columns before rows: its "
    f"groups lie along the rows{_PLAIN}"
)
_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
_COMPRESSED = ("compressed-tensors", "auto-round")  # AutoRound's can be llm-compressor's files


def format_of(tensors: dict, where: str) -> Format | None:
    """The format of the tensors of one matrix, by role; None for a plain floating-point weight.

    Raises:
        ValueError: they are of no known format, or one is of no known role; the message names
            what there is.
    """
    for role in tensors:
        if role not in ROLES:
            raise ValueError(f"{role} beside {where} must be absent: {why_refused(role)}")
    blocks = tensors["weight"].blocks if "weight" in tensors else ""
    if blocks and blocks not in GGUF_TYPES:
        raise ValueError(
            f"{where} must have a type of ggml that moe_ops reads, "
            f"{', '.join(GGUF_TYPES)}, got {blocks}; quantize the model again"
        )
    for form in FORMATS:
        roles = {*form.required, *form.optional}
        if form.blocks != blocks:
            continue
        if not set(form.required) <= tensors.keys() <= roles:
            continue
        if not form.dtypes or tensors["weight"].dtype in form.dtypes:
            return form
    if tensors.keys() == {"weight"} and tensors["weight"].dtype in FLOATS:
        return None
    known = "; ".join(f"{f.name}: {', '.join(f.required)}" for f in FORMATS if not f.blocks)
    found = ", ".join(
        f"{role} ({str(t.dtype).removeprefix('torch.')})" for role, t in tensors.items()
    )
    raise ValueError(
        f"tensors of {where} must be those of one known format ({known}; or one plain weight), "
        f"got {found}"
    )


def _describe_weight_packed(t: dict, config: Config) -> Matrix:
    if t["weight_packed"].dtype not in (torch.int32, torch.uint8):
        raise ValueError(
            "weight_packed must be int32 (integers) or uint8 (mxfp4), got "
            f"{t['weight_packed'].dtype}"
        )
    is_words = t["weight_packed"].dtype == torch.int32
    return (integers.describe_packed if is_words else floats.describe_mxfp4)(t, config)


def _convert_weight_packed(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    is_words = t["weight_packed"].dtype == torch.int32
    matrix = _describe_weight_packed(t, config)
    expected = [matrix.rows, matrix.columns]
    said = [torch.atleast_2d(t["weight_shape"])] if "weight_shape" in t else []
    for shape in (shape for shapes in said for shape in shapes[..., -2:].flatten(0, -2).tolist()):
        if shape != expected:
            raise ValueError(
                f"weight_shape must be {expected}, as the packed elements are, got {shape}"
            )
    return (integers.convert_packed if is_words else floats.convert_mxfp4)(t, config)


def _describe_scaled(t: dict, config: Config) -> Matrix:
    unpacked = integers.is_unpacked(t, config)
    return (integers.describe_unpacked if unpacked else floats.describe_scaled)(t, config)


def _convert_scaled(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    unpacked = integers.is_unpacked(t, config)
    return (integers.convert_unpacked if unpacked else floats.convert_scaled)(t, config)


FORMATS = (
    Format(
        "fine-grained fp8",
        ("weight", "weight_scale_inv"),
        (),
        floats.describe_scale_inv,
        floats.convert_scale_inv,
        (torch.float8_e4m3fn, torch.int8),
        methods=("fp8",),
        turned=_UNKNOWN,
    ),
    Format(
        "mxfp4 blocks",
        ("blocks", "scales"),
        (),
        floats.describe_blocks,
        floats.convert_blocks,
        methods=("mxfp4",),
    ),
    Format(
        "gptq or awq",
        ("qweight", "qzeros", "scales"),
        ("g_idx",),
        integers.describe_int_words,
        integers.convert_int_words,
        methods=("gptq", "awq"),
    ),
    Format(
        "compressed-tensors nvfp4",
        ("weight_packed", "weight_scale", "weight_global_scale"),
        ("input_global_scale",),
        floats.describe_nvfp4,
        floats.convert_nvfp4,
        methods=_COMPRESSED,
    ),
    Format(
        "compressed-tensors packed",
        ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx"),
        _describe_weight_packed,
        _convert_weight_packed,
        methods=_COMPRESSED,
    ),
    Format(
        "modelopt",
        ("weight", "weight_scale", "weight_scale_2"),
        ("input_scale",),
        floats.describe_nvfp4,
        floats.convert_nvfp4,
        (torch.uint8,),
        methods=_MODELOPT,
    ),
    Format(
        "fp8 or int8 with weight_scale",
        ("weight", "weight_scale"),
        ("weight_zero_point", "input_scale"),
        _describe_scaled,
        _convert_scaled,
        (torch.float8_e4m3fn, torch.int8),
        methods=("fp8", *_COMPRESSED, *_MODELOPT),
        turned=_UNKNOWN,
    ),
    Format(
        "modelopt mxfp4",
        ("weight", "weight_scale"),
        (),
        floats.describe_modelopt_mxfp4,
        floats.convert_modelopt_mxfp4,
        (torch.uint8,),
        methods=_MODELOPT,
        turned=_GROUPS_OF_ROWS,
    ),
    Format(
        "mlx",
        ("weight", "scales"),
        ("biases",),
        mlx.describe,
        mlx.convert,
        (torch.uint32,),
        method="mlx",
    ),
    Format(
        "torchao",
        ("_weight_qdata", "_weight_scale"),
        ("_weight_zero_point",),
        floats.describe_torchao,
        floats.convert_torchao,
        tells=True,
    ),
    *(
        Format(
            f"bitsandbytes' {kind}",
            (*bitsandbytes.REQUIRED, state),
            bitsandbytes.NESTED,
            bitsandbytes.describe,
            bitsandbytes.convert,
            (torch.uint8,),
            tells=True,
            turned=_UNKNOWN,
            state=state,
        )
        for kind, state in bitsandbytes.STATES.items()
    ),
    *(
        Format(
            f"GGUF's {name}",
            ("weight",),
            (ggml.FACTOR, ggml.IGNORED) if name == "NVFP4" else (),
            functools.partial(ggml.describe, name),
            functools.partial(ggml.convert, name),
            tells=True,
            blocks=name,
        )
        for name in GGUF_TYPES
    ),
)
ROLES = tuple(sorted({role for f in FORMATS for role in (*f.required, *f.optional)}))


# other names of a role
ALIASES = {"scale": "weight_scale_inv", "qscale_weight": "weight_scale_inv"}
ALIASES |= bitsandbytes.ALIASES


# Factors of columns, by which ModelOpt's AWQ and SmoothQuant divided a matrix and multiply the
# activations. A matrix that becomes plain is multiplied by them instead.
FACTORS = "pre_quant_scale"
_REFUSED = {
    FACTORS: "AWQ's factors would have to multiply each column of the activations; "
    "quantize without AWQ, or let the exporter fold them into what comes before",
    "qdata": "moe_ops wrote this file; load it by from_pretrained or moe_ops.tensors.unflatten",
}


def why_refused(role: str) -> str:
    """Why a tensor of this role beside a weight cannot be left out."""
    known = next((why for end, why in _REFUSED.items() if role.endswith(end)), None)
    return known or "moe_ops does not know how the weight depends on it"
