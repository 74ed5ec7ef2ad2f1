"""Schemes: names, variants, which combinations are legal, and shapes of data and scales."""

import pytest
import torch

from moe_ops.meta import scales
from moe_ops.schemes import (
    GGUF_TYPES,
    PER_BLOCK,
    PER_COLUMN,
    PER_MX_BLOCK,
    PER_NV_BLOCK,
    PER_ROW,
    PER_TENSOR,
    PER_TOKEN_GROUP,
    SCHEMES,
    GroupShape,
    QuantDesc,
    QuantScheme,
    get_scheme,
)

# the other formats: numerics/test_formats.py
QUANTIZED = [name for name in SCHEMES if name.startswith("fp8_")]
ACTIVATIONS = [name for name in QUANTIZED if SCHEMES[name].activation is not None]

# all finite e4m3 magnitudes, from the definition of the format: 4 exponent bits of bias 7, 3 bits
# of mantissa, no infinities, the code of all ones a NaN
E4M3 = sorted(
    {m / 8 * 2.0**-6 for m in range(8)}
    | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)


def test_names_and_variants():
    assert get_scheme("fp8_w8a16").name == "fp8_w8a16:channel"
    assert get_scheme("fp8_w8a16:block").weight.group == PER_BLOCK
    assert get_scheme("fp8_block").activation.group == PER_TOKEN_GROUP
    assert get_scheme("fp8_channel").activation.group == PER_ROW
    assert not get_scheme("fp8_tensor").activation.static
    assert get_scheme("fp8_tensor_static").activation.static
    plain = get_scheme("")
    assert plain.weight is None and plain.activation is None and not plain.weight_only
    assert get_scheme("fp8_w8a16").weight_only and not get_scheme("fp8_block").weight_only
    for name, scheme in SCHEMES.items():
        assert scheme.name == name and get_scheme(name) is scheme and get_scheme(scheme) is scheme
    assert get_scheme("int4_w4a16").name == "int4_w4a16:g128"
    assert get_scheme("int8_w8a16:zp").weight.zero_point
    assert get_scheme("q4_k").name == "int4_w4a16:g32:super:min"
    assert (
        get_scheme("q3_k").name == "custom:int4,1x16,int8" == get_scheme(get_scheme("q3_k")).name
    )
    assert get_scheme("mxfp4").activation and get_scheme(GGUF_TYPES["MXFP4"]).weight_only
    assert get_scheme("mxfp4:ocp") is get_scheme("mxfp4") != get_scheme("mxfp4:round")
    config_names = [scheme.config_name for scheme in SCHEMES.values()]
    assert len(set(config_names)) == len(config_names) and "unquantized" in config_names
    assert all(name.replace("-", "_").isidentifier() for name in config_names)


@pytest.mark.parametrize("short", sorted({name.split(":")[0] for name in SCHEMES if name}))
def test_names_without_a_variant(short):
    """Documents call families by them: each is a name, of a scheme whose variant is left out."""
    scheme = get_scheme(short)
    assert scheme.name in SCHEMES and scheme.name.split(":")[0] == short


def test_unknown_name_lists_the_known():
    families = "Families: fp8, int8, int4, int6, int5, iq4, nf4, fp4, mxfp4, mxfp6, mxfp8, nvfp4"
    for wrong, meant in (
        ("best", "."),
        ("fp9", "; did you mean 'fp4'?"),
        ("int4", "; did you mean 'int4_w4a16' or 'int4_w4a8'?"),
        ("INT4", "; did you mean 'int4_w4a16' or 'int4_w4a8'?"),
        ("fp8blok", "; did you mean 'fp8_block'?"),
    ):
        with pytest.raises(ValueError) as caught:
            get_scheme(wrong)
        start = f"scheme must be one of moe_ops.schemes.SCHEMES, got {wrong!r}"
        assert str(caught.value) == f"{start}{meant} {families}"
    with pytest.raises(ValueError, match="did you mean 'fp8_w8a16' .*'fp8_tensor' .*'fp8_block'"):
        get_scheme("fp8")
    for wrong in (None, ["fp8_block"], torch.ones(2)):
        kind = type(wrong).__name__
        with pytest.raises(ValueError, match=f"scheme must be a name, such as .*, got {kind}$"):
            get_scheme(wrong)
    with pytest.raises(ValueError, match="fp8_w8a16:block"):
        get_scheme("fp8_w8a16:row")
    taken = QuantScheme("fp8_block", QuantDesc("e4m3", PER_ROW), None)
    with pytest.raises(ValueError, match="name of its own, got a QuantScheme named 'fp8_block'"):
        get_scheme(taken)
    with pytest.raises(ValueError, match="quantizes weights, such as 'fp8_block', got ''"):
        get_scheme("").scale_shape(2, 3)


W = QuantDesc("e4m3", PER_ROW)
E8M0, E4M3_SCALE = torch.float8_e8m0fnu, torch.float8_e4m3fn
MX = {"scale_dtype": E8M0, "scale_rule": "ocp"}
ILLEGAL = {
    "scale_dtype must be": lambda: QuantDesc("e4m3", PER_ROW, scale_dtype=torch.float64),
    "either a global_scale or a channel_scale": lambda: QuantDesc(
        "e2m1", PER_TOKEN_GROUP, scale_dtype=E4M3_SCALE
    ),
    "channel_scale must be False": lambda: QuantDesc("int4", PER_TOKEN_GROUP, channel_scale=True),
    "scale_rule must be one of": lambda: QuantDesc("e2m1", PER_TOKEN_GROUP, scale_dtype=E8M0),
    "float32, got 'ocp'": lambda: QuantDesc("int8", PER_ROW, scale_rule="ocp"),
    "float8_e4m3fn, got 'ceil'": lambda: QuantDesc(
        "e2m1", PER_NV_BLOCK, scale_dtype=E4M3_SCALE, global_scale=True, scale_rule="ceil"
    ),
    "need groups of some columns of one row": lambda: QuantDesc("e2m1", PER_ROW, **MX),
    "a channel_scale need groups": lambda: QuantDesc(
        "int4", PER_ROW, scale_dtype=E4M3_SCALE, channel_scale=True
    ),
    "activations are symmetric": lambda: QuantScheme(
        "x", QuantDesc("int8", PER_ROW), QuantDesc("int8", PER_ROW, False, zero_point=True)
    ),
    "activations must have a dtype": lambda: QuantScheme(
        "x", QuantDesc("int8", PER_ROW), QuantDesc("int8", PER_ROW, False, None)
    ),
    "no scale_rule finds it": lambda: QuantScheme(
        "x", W, QuantDesc("e4m3", PER_TENSOR, scale_rule="ceil")
    ),
    "scales that take any value": lambda: QuantDesc(
        "int4", PER_TOKEN_GROUP, zero_point=True, **MX
    ),
    "beside a minimum, which takes its place": lambda: QuantDesc(
        "int4", PER_ROW, zero_point=True, minimum=True
    ),
    "minimum must be False for e4m3": lambda: QuantDesc("e4m3", PER_ROW, minimum=True),
    "minimum must be False with scales of": lambda: QuantDesc(
        "int4", PER_TOKEN_GROUP, minimum=True, **MX
    ),
    "need symmetric weights, without": lambda: QuantScheme(
        "x", QuantDesc("int8", PER_ROW, minimum=True), QuantDesc("int8", PER_ROW, False)
    ),
    "leaves it no room": lambda: QuantDesc("int4", PER_ROW, zero_point=True, scale_rule="ceil"),
    "need symmetric weights": lambda: QuantScheme(
        "x", QuantDesc("int8", PER_ROW, zero_point=True), QuantDesc("int8", PER_ROW, False)
    ),
    "int8; beside them a minimum is one too": lambda: QuantDesc(
        "int4", PER_MX_BLOCK, scale_dtype=torch.int8, zero_point=True
    ),
    "must divide 256 columns": lambda: QuantDesc(
        "int4", GroupShape(1, 48), scale_dtype=torch.int8
    ),
    "int8 ones, a global_scale": lambda: QuantDesc("int4", PER_BLOCK, scale_dtype=torch.int8),
    "activations have scales of one level": lambda: QuantScheme(
        "x",
        QuantDesc("int8", PER_ROW),
        QuantDesc("int8", PER_MX_BLOCK, False, scale_dtype=torch.int8),
    ),
    "must be positive": lambda: GroupShape(0, 128),
    "must be one of": lambda: QuantDesc("e9m9", PER_ROW),
    "symmetric": lambda: QuantDesc("e4m3", PER_ROW, zero_point=True),
    "fewer bits": lambda: QuantDesc("e4m3", PER_ROW, global_scale=True),
    "computed once": lambda: QuantScheme("x", QuantDesc("e4m3", PER_ROW, static=False), None),
    "need quantized weights": lambda: QuantScheme("x", None, W),
    "groups of 128 tokens": lambda: QuantScheme("x", W, QuantDesc("e4m3", PER_BLOCK, False)),
    "cannot leave": lambda: QuantScheme("x", W, QuantDesc("e4m3", PER_COLUMN, False)),
    "leave the matrix": lambda: QuantScheme(
        "x", QuantDesc("e4m3", PER_COLUMN), QuantDesc("e4m3", PER_ROW, False)
    ),
    "for each token": lambda: QuantScheme("x", W, QuantDesc("e4m3", GroupShape(-1, 128), False)),
    "not known beforehand": lambda: QuantScheme("x", W, QuantDesc("e4m3", PER_ROW, True)),
    "groups of 96 and 128": lambda: QuantScheme(
        "x", QuantDesc("e4m3", PER_BLOCK), QuantDesc("e4m3", GroupShape(1, 96), False)
    ),
}


def test_schemes_of_ones_own_spell_out_their_descriptions():
    """A name that any process understands; that of the table where the descriptions are in it."""
    token = QuantDesc("int8", GroupShape(1, 64), static=False, scale_rule="ceil")
    mine = get_scheme(QuantScheme("mine", W, token))
    assert mine.name == "custom:e4m3,1xall,f32:int8,1x64,f32,ceil,dynamic"
    assert (mine.weight, mine.activation) == (W, token)
    assert get_scheme(mine) is get_scheme(mine.name) is mine
    for named in SCHEMES.values():
        again = get_scheme(QuantScheme("mine", named.weight, named.activation))
        assert (again.weight, again.activation) == (named.weight, named.activation)
        assert again.name in SCHEMES
    assert get_scheme(QuantScheme("mine", W, SCHEMES["fp8_tensor"].activation)).name == (
        "fp8_channel_tensor"
    )
    for wrong in ("custom:", "custom:e4m3", "custom:e4m3,1xall,f32,dynamic", f"{mine.name}:"):
        with pytest.raises(ValueError, match="must spell out the descriptions"):
            get_scheme(wrong)


def test_tuning_tables_do_not_tell_rules_of_scales_apart():
    assert get_scheme("fp8_block:ue8m0").measured_as == "fp8_block"
    assert get_scheme("mxfp4_w4a16:ceil").measured_as == "mxfp4_w4a16"
    for name in ("", "fp8_w8a16:block", "int4_w4a16:g64:zp", "mxfp6_e3m2:mxfp8"):
        assert get_scheme(name).measured_as == name


@pytest.mark.parametrize("reason", ILLEGAL)
def test_illegal_combinations_say_why(reason):
    with pytest.raises(ValueError, match=reason):
        ILLEGAL[reason]()


def test_group_predicates():
    assert PER_TENSOR.is_tensor and PER_ROW.is_row and PER_COLUMN.is_column and PER_BLOCK.is_block
    assert PER_TOKEN_GROUP.is_block and not PER_ROW.is_block and not PER_TENSOR.is_row
    assert not PER_TENSOR.is_column and not PER_BLOCK.is_tensor


def test_scale_shapes():
    assert get_scheme("fp8_tensor").scale_shape(200, 300) == ()
    assert get_scheme("fp8_tensor").batched_scale_shape(5, 200, 300) == (5,)
    assert get_scheme("fp8_channel").batched_scale_shape(5, 200, 300) == (5, 200, 1)
    assert get_scheme("fp8_block").scale_shape(200, 300) == (2, 3)
    assert get_scheme("fp8_block").batched_scale_shape(5, 256, 384) == (5, 2, 3)
    assert get_scheme("fp8_block").activation.scale_shape(7, 300) == (7, 3)
    assert QuantDesc("e4m3", PER_COLUMN).scale_shape(7, 300) == (1, 300)


def test_shapes_of_packed_weights():
    for name, packed, scale in (
        ("int8_w8a16:g64", 256, 4),
        ("int4_w4a16:g32", 128, 8),
        ("mxfp6_e3m2", 192, 8),
        ("mxfp8", 256, 8),
        ("nvfp4", 128, 16),
        ("int4_w4a8", 128, 2),
    ):
        scheme = get_scheme(name)
        assert scheme.qdata_shape(5, 7, 256) == (5, 7, packed)
        assert scheme.logical_shape(5, 7, packed) == (5, 7, 256)
        shapes = scheme.scale_shapes(5, 7, 256)
        assert shapes["scale"] == (5, 7, scale) and shapes["zero_point"] is None
        assert shapes["global_scale"] == ((5,) if name == "nvfp4" else None)
        assert shapes["channel_scale"] == ((5, 7, 1) if name == "int4_w4a8" else None)
    assert get_scheme("int4_w4a16:g32:zp").scale_shapes(5, 7, 256)["zero_point"] == (5, 7, 8)
    shapes = get_scheme("q4_k").scale_shapes(5, 7, 512)
    assert shapes["scale"] == shapes["zero_point"] == (5, 7, 16)
    assert shapes["channel_scale"] == (5, 7, 4)  # of scales and of minima
    assert get_scheme("q6_k").scale_shapes(5, 7, 512)["channel_scale"] == (5, 7, 2)
    assert get_scheme("").logical_shape(5, 7, 256) == (5, 7, 256)


def test_columns_that_groups_do_not_divide():
    assert get_scheme("fp8_block").why_not_shape(100, 130) == ""
    assert get_scheme("int4_w4a16:g64").why_not_shape(100, 192) == ""
    reason = get_scheme("int4_w4a16:g64:zp").why_not_shape(100, 96)
    assert "96 columns must be a multiple of 64" in reason and "g32:zp' take it" in reason
    assert "'int4_w4a16:g32'" not in reason
    reason = get_scheme("q6_k").why_not_shape(100, 128)
    assert "128 columns must be a multiple of 256" in reason and "int6_w6a16:g16' takes" in reason
    assert "must be even" in get_scheme("int4_w4a16:channel").why_not_shape(100, 97)
    assert get_scheme("int8_w8a16:channel").why_not_shape(100, 97) == ""


def test_scale_shapes_of_symbolic_sizes():
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    source = ConstantSource("M")
    symbol = env.create_symbol(300, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    m = env.create_symintnode(symbol, hint=300, source=source)
    for group in (PER_TENSOR, PER_ROW, PER_COLUMN, PER_BLOCK, PER_TOKEN_GROUP):
        symbolic = scales.batched_scale_shape(4, m, m, group.rows, group.cols)
        want = scales.batched_scale_shape(4, 300, 300, group.rows, group.cols)
        assert (
            tuple(size if isinstance(size, int) else size.node.hint for size in symbolic) == want
        )
    assert not env.guards


def test_schemes_resolve_inside_compiled_code():
    def run(x, name):
        scheme = get_scheme(name)
        return x.new_zeros(scheme.batched_scale_shape(2, *x.shape))

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert compiled(torch.ones(130, 300), "fp8_w8a16:block").shape == (2, 2, 3)
    with pytest.raises(Exception, match="must be one of"):
        compiled(torch.ones(2, 3), "fp9")
