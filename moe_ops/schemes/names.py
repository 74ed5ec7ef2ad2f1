"""Schemes by name: named ones, those whose names spell them out, and those of layers with two."""

from __future__ import annotations

from moe_ops.checks import did_you_mean
from moe_ops.schemes.descriptions import SCALE_DTYPES, SCALE_RULES, GroupShape, QuantDesc
from moe_ops.schemes.scheme import QuantScheme
from moe_ops.schemes.table import OTHER_NAMES, SCHEMES

_FAMILIES = tuple(dict.fromkeys([name.split(":")[0].split("_")[0] for name in SCHEMES if name]))


def get_scheme(scheme: str | QuantScheme) -> QuantScheme:
    """The scheme of a name such as "fp8_block" or "int4_w4a16:g64"; "" means plain weights.

    A name without its variant means the default one: "fp8_w8a16" is "fp8_w8a16:channel". The
    types of GGUF's blocks are names too, "q4_k" of "int4_w4a16:g32:super:min" (`GGUF_TYPES`; but
    "mxfp4" and "nvfp4" quantize activations, unlike the blocks of that name). For a
    QuantScheme of one's own it is the named scheme with the same descriptions, else the scheme
    whose name spells out both descriptions, because operators, files and exported programs refer
    to schemes by name.

    Raises:
        ValueError: the name is unknown, or a QuantScheme has the name of another one.
    """
    if isinstance(scheme, QuantScheme):
        named = SCHEMES.get(scheme.name)
        if named is not None and named != scheme:
            raise ValueError(
                f"scheme must have a name of its own, got a QuantScheme named {scheme.name!r} "
                "that differs from the one of that name"
            )
        return named or _alike(scheme)
    if not isinstance(scheme, str):
        raise ValueError(
            "scheme must be a name, such as 'fp8_block', or a QuantScheme, got "
            f"{type(scheme).__name__}"
        )
    name = OTHER_NAMES.get(scheme, scheme)
    found = SCHEMES.get(name) or _spelled_out.get(name)
    if found is None and name.startswith(_CUSTOM):
        return _spell(name)
    if found is None:
        known = [name for name in (*OTHER_NAMES, *SCHEMES) if name]
        if ":" not in scheme:  # those without a variant stand for the default one
            known = list(dict.fromkeys([name.split(":")[0] for name in known]))
        raise ValueError(
            f"scheme must be one of moe_ops.schemes.SCHEMES, got {scheme!r}"
            f"{did_you_mean(scheme, known) or '.'} Families: {', '.join(_FAMILIES)}"
        )
    return found


# --- layers of two schemes: names that join that of w13 and that of w2 ---------------------------

_PLAIN = "plain"  # stands for "" there


def layer_scheme(w13: str, w2: str) -> str:
    """One name for the schemes of a layer: that of both weights, or of w13 and w2 by their full
    names, as in "int4_w4a16:g128+plain".
    """
    return w13 if w13 == w2 else f"{w13 or _PLAIN}+{w2 or _PLAIN}"


def schemes_of_layer(scheme: str) -> tuple[str, str]:
    """The schemes of w13 and w2, from the result of `layer_scheme`."""
    if "+" not in scheme:
        return scheme, scheme
    w13, w2 = ["" if name == _PLAIN else name for name in scheme.split("+")]
    return w13, w2


# --- schemes of one's own: names that spell out both descriptions --------------------------------

_CUSTOM = "custom:"
_FLAGS = {
    "global": "global_scale",
    "channel": "channel_scale",
    "zp": "zero_point",
    "min": "minimum",
}
_spelled_out: dict[str, QuantScheme] = {}


def _alike(scheme: QuantScheme) -> QuantScheme:
    """The named scheme of the same descriptions, or the one whose name spells them out."""
    for named in SCHEMES.values():
        if (named.weight, named.activation) == (scheme.weight, scheme.activation):
            return named
    descriptions = [d for d in (scheme.weight, scheme.activation) if d is not None]
    return _spell(_CUSTOM + ":".join(map(_text_of, descriptions)))


def _text_of(desc: QuantDesc) -> str:
    """E.g. "e4m3,1x128,f32,ceil,dynamic"."""
    sizes = ["all" if size == -1 else str(size) for size in (desc.group.rows, desc.group.cols)]
    parts = [desc.dtype, "x".join(sizes), SCALE_DTYPES[desc.scale_dtype], desc.scale_rule]
    parts += [flag for flag, field in _FLAGS.items() if getattr(desc, field)]
    return ",".join([part for part in (*parts, "" if desc.static else "dynamic") if part])


def _spell(name: str) -> QuantScheme:
    """The scheme of a name that `_text_of` made. Raises ValueError for others."""
    try:
        weight, *others = [_description(part) for part in name.removeprefix(_CUSTOM).split(":")]
        scheme = QuantScheme(name, weight, others[0] if others else None)
        if name != _CUSTOM + ":".join(map(_text_of, (weight, *others[:1]))):
            raise ValueError("it is not spelled as moe_ops spells it")
    except (ValueError, KeyError) as error:
        raise ValueError(
            "scheme must spell out the descriptions of weights and of activations, as in "
            f"'{_CUSTOM}e4m3,1xall,f32:e4m3,allxall,f32,dynamic', got {name!r}: {error}"
        ) from error
    return _spelled_out.setdefault(name, scheme)


def _description(text: str) -> QuantDesc:
    """The inverse of `_text_of`."""
    dtype, group, scale, *rest = text.split(",")
    rows, cols = [-1 if size == "all" else int(size) for size in group.split("x")]
    return QuantDesc(
        dtype,
        GroupShape(rows, cols),
        static="dynamic" not in rest,
        scale_dtype={text: dtype for dtype, text in SCALE_DTYPES.items()}[scale],
        scale_rule=next((rule for rule in SCALE_RULES if rule in rest), ""),
        **{field: flag in rest for flag, field in _FLAGS.items()},
    )
