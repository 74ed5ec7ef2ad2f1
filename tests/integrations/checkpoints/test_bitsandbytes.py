"""Checkpoints of bitsandbytes in 4 bits: blocks that cross rows and experts, and states."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch

import moe_ops
from moe_ops.integrations.checkpoints import Checkpoint, bitsandbytes
from moe_ops.schemes import get_scheme
from tests.support import oracle
from tests.support.paths import ROOT

files = pytest.importorskip("safetensors.torch")
safetensors = pytest.importorskip("safetensors")

FIXTURES = ROOT / "tests" / "fixtures" / "bitsandbytes"
CODES = ROOT / "tests" / "fixtures" / "bitsandbytes_codes.safetensors"
NF4_OF_ROWS = "custom:nf4,1x256,f32"
PREFIX = "model.layers.0.mlp.experts"
E, N, K = 3, 24, 96  # 64 divides neither a row nor an expert


def write_matrix(shape, rng, kind="nf4", block=64, double=False):
    """(tensors by what follows ".weight", fp32 values) by the flat formula, in numpy alone."""
    count = math.prod(shape)
    codes = rng.integers(0, 16, count, np.uint8)
    blocks = -(-count // block)
    levels = np.array(oracle.code_values(kind), np.float32)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [*shape]}
    tensors = {"": codes[::2] << 4 | codes[1::2], ".quant_map": levels}
    if double:
        stored = rng.integers(0, 256, blocks, np.uint8)
        table = np.sort(rng.standard_normal(256).astype(np.float32) * 0.01)
        nested = (0.5 + rng.random(-(-blocks // 256))).astype(np.float32)
        offset = float(np.float32(0.2277069091796875))
        absmax = table[stored] * nested[np.arange(blocks) // 256] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {".nested_absmax": nested, ".nested_quant_map": table, ".absmax": stored}
    else:
        absmax = (0.1 + rng.random(blocks)).astype(np.float32)
        tensors[".absmax"] = absmax
    values = levels[codes] * absmax[np.arange(count) // block]
    assert values.dtype == np.float32
    found = {end: torch.from_numpy(t) for end, t in tensors.items()}
    found[""] = found[""].unsqueeze(1)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    found[f".quant_state.bitsandbytes__{kind}"] = torch.from_numpy(text)
    return found, torch.from_numpy(values).reshape(shape)


def write(folder, fused=False, change=None, rng=None, n=N, k=K, **options):
    """A checkpoint of one layer; returns the values (E, rows, columns) by projection."""
    rng = rng or np.random.default_rng(0)
    tensors, values = {}, {}
    names = {"gate_up_proj": (2 * n, k), "down_proj": (k, n)} if fused else {}
    names = names or {"gate_proj": (n, k), "up_proj": (n, k), "down_proj": (k, n)}
    for name, shape in names.items():
        if fused:
            found, values[name] = write_matrix((E, *shape), rng, **options)
            tensors |= {f"{PREFIX}.{name}{end}": t for end, t in found.items()}
            continue
        each = [write_matrix(shape, rng, **options) for _ in range(E)]
        values[name] = torch.stack([v for _, v in each])
        for e, (found, _) in enumerate(each):
            tensors |= {f"{PREFIX}.{e}.{name}.weight{end}": t for end, t in found.items()}
    if change:
        change(tensors)
    files.save_file(tensors, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("block", "columns"), [(64, 32), (32, 32), (128, 32), (2**30, 32)])
def test_values_of_experts_one_by_one(kind, double, block, columns, tmp_path):
    values = write(tmp_path, kind=kind, double=double, block=block)
    w13 = Checkpoint(tmp_path).expert_weight(PREFIX)
    wanted = torch.cat((values["gate_proj"], values["up_proj"]), 1)
    assert torch.equal(w13.dequantize(torch.float32), wanted)
    assert w13.scale.shape == (E, 2 * N, K // columns)
    w2 = Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",))
    assert torch.equal(w2.dequantize(torch.float32), values["down_proj"])
    assert w2.scheme == f"custom:{kind},1x8,f32"  # of 24 columns


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("n", "k"), [(N, K), (64, 128), (8, 16)])
def test_values_of_a_stack(double, n, k, tmp_path):
    values = write(tmp_path, fused=True, double=double, n=n, k=k)
    checkpoint = Checkpoint(tmp_path)
    for name in ("gate_up_proj", "down_proj"):
        weight = checkpoint.expert_weight(PREFIX, (name,))
        assert torch.equal(weight.dequantize(torch.float32), values[name])
        some = checkpoint.expert_weight(PREFIX, (name,), expert_ids=range(2, 0, -1))
        assert torch.equal(some.dequantize(torch.float32), values[name][[2, 1]])


@pytest.mark.parametrize("name", sorted(folder.name for folder in FIXTURES.iterdir()))
def test_files_of_bitsandbytes(name):
    expected = safetensors.safe_open(FIXTURES / name / "expected.safetensors", "pt").metadata()
    checkpoint = Checkpoint(FIXTURES / name)
    for key, wanted in expected.items():
        *_, number, projection = key.removesuffix(".weight").split(".")
        ids = range(int(number), int(number) + 1) if number.isdecimal() else None
        weight = checkpoint.expert_weight(PREFIX, (projection,), expert_ids=ids)
        assert weight.scheme == "nf4_w4a16:g64"
        values = weight.dequantize(torch.float32).contiguous()
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == wanted, key


UP = f"{PREFIX}.1.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"


def said(**changes):
    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        state = {name: value for name, value in state.items() if value != "gone"}
        tensors[STATE] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)

    return change


def tensor(end, function):
    return lambda tensors: tensors.update({UP + end: function(tensors[UP + end])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (said(blocksize="gone"), "blocksize must be a positive int32"),
        (said(blocksize=0), "blocksize must be a positive int32"),
        (said(nested_blocksize=10**30), "blocksize must be a positive int32"),
        (said(blocksize=7), "columns that share a factor of 8 or more with the blocks of 7"),
        (said(quant_type="nf3"), "quant_type must be one of"),
        (said(quant_type="fp4"), "quant_type must be that of its tensor's name, got 'fp4'"),
        (said(shape=[N, K + 64]), "weight must have shape"),
        (said(shape=[N * K]), "shape must be"),
        (said(shape=[K, N]), "must be stored like|must have 24 rows"),
        (said(nested_offset="gone"), "nested_offset.* must be there together"),
        (said(nested_dtype="float16"), "must be there together, the dtype 'float32'"),
        (said(nested_offset=float("inf")), "must be JSON|nested_offset must be a finite"),
        (said(rotation="hadamard"), "rotation of quant_state must be a field"),
        (tensor("", lambda t: t[:-1]), "weight must have shape"),
        (tensor("", lambda t: t.view(torch.int8)), "known format"),
        (tensor(".absmax", lambda t: t[:-1]), "weight.absmax must have shape"),
        (tensor(".absmax", lambda t: t.float()), "weight.absmax must be one of"),
        (tensor(".absmax", lambda t: t.reshape(4, -1)), "weight.absmax must have shape"),
        (tensor(".quant_map", lambda t: t.flip(0)), "weight.quant_map must be the levels of nf4"),
        (tensor(".nested_absmax", lambda t: t * math.nan), "must be finite"),
        (lambda t: t.pop(f"{UP}.nested_absmax"), "weight.nested_absmax must be there"),
        (lambda t: t.pop(f"{UP}.absmax"), "known format"),
        (lambda t: t.pop(STATE), "known format"),
        (tensor(STATE.removeprefix(UP), lambda t: t[:-3]), "must be JSON"),
    ],
)
def test_refused(change, message, tmp_path):
    write(tmp_path, change=change, double=True)
    with pytest.raises(ValueError, match=message) as error:
        Checkpoint(tmp_path).expert_weight(PREFIX)
    assert "1.up_proj.weight" in str(error.value) and "model.safetensors" in str(error.value)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantize_gives_the_bits_of_bitsandbytes(kind, dtype):
    """Of numbers with all midpoints of levels and their neighbours, blocks of zeros and of the
    smallest numbers: what its `quantize_4bit` made of them.
    """
    with safetensors.safe_open(CODES, "pt") as file:
        x, codes, absmax = [
            file.get_tensor(f"{kind}.{dtype}.{part}") for part in ("x", "codes", "absmax")
        ]
    weight = moe_ops.quantize(x, kind)
    assert torch.equal((weight.qdata << 4 | weight.qdata >> 4).reshape(codes.shape), codes)
    assert torch.equal(weight.scale.flatten(), absmax)


def test_quantize_takes_the_nearest_level():
    """Of x * (1 / absmax), the lower one of two that are as near."""
    x = torch.randn(2, 8, 192, generator=torch.Generator().manual_seed(0))
    x[0, 0, :64] = 0
    levels = torch.tensor(oracle.code_values("nf4"), dtype=torch.float32)
    between = (levels[:-1] + levels[1:]) / 2
    blocks = x.unflatten(-1, (-1, 64))
    absmax = blocks.abs().amax(-1, keepdim=True)
    x[1, 1, 0] = absmax[1, 1, 0, 0] * between[9]
    weight = moe_ops.quantize(x, "nf4")
    reciprocal = torch.where(absmax == 0, 1.0, 1 / absmax)
    codes = (blocks * reciprocal).unsqueeze(-1).gt(between).sum(-1)
    wanted = levels[codes] * absmax
    assert torch.equal(weight.dequantize(), wanted.flatten(-2))
    assert torch.equal(moe_ops.quantize(weight.dequantize(), "nf4").qdata, weight.qdata)


def test_double_quantization_is_undone(tmp_path):
    """Of the tensors of a model's other layers; not a value changes."""
    values = {}

    def undo(tensors):
        tensors |= {"norm.weight": torch.ones(3)}
        found = bitsandbytes.without_double_quantization(tensors)
        assert not [name for name in found if "nested" in name]
        assert found["norm.weight"] is tensors.pop("norm.weight")
        tensors.clear()
        tensors |= found
        del tensors["norm.weight"]

    values = write(tmp_path, change=undo, double=True)
    w13 = Checkpoint(tmp_path).expert_weight(PREFIX)
    wanted = torch.cat((values["gate_proj"], values["up_proj"]), 1)
    assert torch.equal(w13.dequantize(torch.float32), wanted)


@pytest.mark.parametrize("scheme", ["nf4", "fp4_w4a16:g32", NF4_OF_ROWS])
def test_stored_as_it_is_read(scheme, tmp_path):
    """A stack and one matrix, by the flat formula."""
    weight = moe_ops.quantize(torch.randn(E, 8, 256, dtype=torch.bfloat16), scheme)
    scheme, desc = get_scheme(weight.scheme), get_scheme(weight.scheme).weight
    for part in (weight, weight[1]):
        tensors = bitsandbytes.stored(scheme, part.qdata, part.scale, part.dtype)
        state = json.loads(bytes(tensors.pop(bitsandbytes.STATES[desc.dtype]).tolist()))
        size = state["blocksize"]
        assert state == {
            "quant_type": desc.dtype,
            "blocksize": desc.group.cols,
            "dtype": "bfloat16",
            "shape": [*part.shape],
        }
        codes = tensors["weight"].numpy()
        assert codes.shape == (part.numel() // 2, 1)
        codes = np.stack((codes >> 4, codes & 15), -1).flatten()
        levels, absmax = [tensors[f"weight.{end}"].numpy() for end in ("quant_map", "absmax")]
        assert levels.tolist() == oracle.code_values(desc.dtype)
        values = levels[codes] * absmax[np.arange(len(codes)) // size]
        wanted = part.dequantize(torch.float32).numpy()
        assert np.array_equal(values.reshape(part.shape), wanted)


@pytest.mark.parametrize("scheme", ["int4_w4a16:g32", "mxfp4_w4a16", "custom:nf4,1x16,f32"])
def test_what_bitsandbytes_does_not_have(scheme):
    with pytest.raises(ValueError, match="must be nf4 or fp4 in groups of 32 to 4096 columns"):
        bitsandbytes.check_storable(get_scheme(scheme))
