"""GGUF files: the values of every type of blocks, what is refused, and files that are damaged."""

import hashlib
import os
import random

import numpy as np
import pytest
import torch

from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.checkpoints import gguf as reader
from moe_ops.tensors import ExpertTensor
from tests.support import gguf
from tests.support.paths import ROOT

files = pytest.importorskip("safetensors")

FIXTURES = ROOT / "tests" / "fixtures" / "gguf"
E, N, K = 3, 4, 512
FIELDS = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": E}
DECODED = [*gguf.HALVES]


def tensor(kind, shape=(E, N, K), seed=0):
    return kind, shape, gguf.blocks(kind, shape, np.random.default_rng(seed))


def experts(kind, shape=(E, N, K), seed=0):
    names = ("gate", "up", "down")
    return {
        f"blk.0.ffn_{name}_exps.weight": tensor(kind, shape, seed + i)
        for i, name in enumerate(names)
    }


def values_of(kind, shape, content):
    return torch.from_numpy(gguf.values(kind, content, shape))


def read(path, *names, **options):
    weight = Checkpoint(path).expert_weight("blk.0", names, **options)
    return weight.dequantize(torch.float32) if isinstance(weight, ExpertTensor) else weight.float()


@pytest.mark.parametrize("kind", DECODED)
def test_values_of_every_bit(kind, tmp_path):
    tensors = experts(kind)
    path = gguf.write(tmp_path / "model.gguf", FIELDS, tensors)
    gate, up = (tensors[f"blk.0.ffn_{name}_exps.weight"] for name in ("gate", "up"))
    both = torch.cat((values_of(*gate), values_of(*up)), 1)
    assert torch.equal(read(path, "ffn_gate_exps", "ffn_up_exps"), both)
    some = read(path, "ffn_up_exps", expert_ids=range(2, 0, -1))
    assert torch.equal(some, values_of(*up)[[2, 1]])


@pytest.mark.parametrize("kind", [kind for kind in DECODED if kind not in ("Q2_K", "Q3_K")])
def test_bytes_are_those_of_the_file(kind, tmp_path):
    tensors = experts(kind)
    path = gguf.write(tmp_path / "model.gguf", FIELDS, tensors)
    weight = Checkpoint(path).expert_weight("blk.0", ("ffn_down_exps",))
    *_, content = tensors["blk.0.ffn_down_exps.weight"]
    scales = 0 if weight.global_scale is None else weight.global_scale.nbytes
    assert len(content) <= weight.nbytes - scales <= 1.03 * len(content)


@pytest.mark.parametrize("kind", DECODED)
def test_values_are_those_of_the_package(kind):
    package = pytest.importorskip("gguf")
    content = gguf.blocks(kind, (64, 512), np.random.default_rng(1))
    number, elements, size = gguf.TYPES[kind]
    rows = np.frombuffer(content, np.uint8).reshape(64, -1, size).copy()
    if kind == "NVFP4":  # NaN is 0 to llama.cpp alone
        rows[..., :4][rows[..., :4] & 127 == 127] = 0
    of_rows = rows.reshape(64, 512 // elements * size)
    found = package.quants.dequantize(of_rows, package.GGMLQuantizationType(number))
    assert np.array_equal(found, gguf.values(kind, rows.tobytes(), (64, 512)))


@pytest.mark.parametrize("name", sorted(folder.name for folder in FIXTURES.iterdir()))
def test_files_of_llama_cpp(name):
    expected = files.safe_open(FIXTURES / name / "expected.safetensors", "pt").metadata()
    checkpoint = Checkpoint(FIXTURES / name / "model.gguf")
    for key, wanted in expected.items():
        block, _, projection = key.removeprefix("sha256:").removesuffix(".weight").rpartition(".")
        weight = checkpoint.expert_weight(block, (projection,))
        if weight.global_scale is not None:  # the numbers are of the blocks alone
            factor = weight.global_scale
            weight = weight._replace(global_scale=torch.ones_like(factor))
        values = weight.dequantize(torch.float32).contiguous()
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == wanted, key


def test_nvfp4_has_a_factor_for_each_expert(tmp_path):
    tensors = experts("NVFP4")
    factors = torch.tensor([0.25, 3.0, 0.7])
    tensors["blk.0.ffn_up_exps.scale"] = ("F32", (E,), factors.numpy().tobytes())
    tensors["blk.0.ffn_up_exps.input_scale"] = ("F32", (E,), factors.numpy().tobytes())
    path = gguf.write(tmp_path / "model.gguf", FIELDS, tensors)
    gate, up = (values_of(*tensors[f"blk.0.ffn_{p}_exps.weight"]) for p in ("gate", "up"))
    found = read(path, "ffn_gate_exps", "ffn_up_exps")
    wanted = torch.cat((gate, up * factors[:, None, None]), 1)
    torch.testing.assert_close(found, wanted, rtol=3e-7, atol=0)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_experts_and_a_scheme_for_them(kind, tmp_path):
    numbers = np.random.default_rng(0).standard_normal((E, N, K)).astype(np.float32)
    content = {
        "F32": numbers.tobytes(),
        "F16": numbers.astype("<f2").tobytes(),
        "BF16": (numbers.view(np.uint32) >> 16).astype("<u2").tobytes(),
    }[kind]
    tensors = {"blk.0.ffn_down_exps.weight": (kind, (E, N, K), content)}
    path = gguf.write(tmp_path / "model.gguf", FIELDS, tensors)
    wanted = values_of(*tensors["blk.0.ffn_down_exps.weight"])
    assert torch.equal(read(path, "ffn_down_exps"), wanted)
    quantized = read(path, "ffn_down_exps", scheme="int8_w8a16:g64")
    assert 0 < (quantized - wanted).norm() / wanted.norm() < 0.01


def test_split_file(tmp_path):
    tensors = experts("Q4_0")
    parts = [{}, dict([*tensors.items()][:2]), dict([*tensors.items()][2:])]
    for i, part in enumerate(parts):
        fields = {"split.no": i, "split.count": 3, "split.tensors.count": 3}
        fields = FIELDS | fields if not i else fields
        gguf.write(tmp_path / f"m-{i + 1:05}-of-00003.gguf", fields, part)
    for i in range(3):
        path = tmp_path / f"m-{i + 1:05}-of-00003.gguf"
        down = tensors["blk.0.ffn_down_exps.weight"]
        assert torch.equal(read(path, "ffn_down_exps"), values_of(*down))
    swapped = [tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 3, 2)]
    with pytest.raises(ValueError, match=r"split.no and split.count of .*00003-of.* must be 1"):
        Checkpoint(swapped)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ValueError, match="m-00002-of-00003.gguf; download"):
        Checkpoint(tmp_path / "m-00001-of-00003.gguf")


@pytest.mark.parametrize("name", ["m-00001-of-00000", "m-00003-of-00002", "m-00000-of-00002"])
def test_a_part_is_one_of_those_that_its_name_counts(name, tmp_path):
    for file in (name, "m-00001-of-00002", "m-00002-of-00002"):
        gguf.write(tmp_path / f"{file}.gguf", FIELDS, {})
    with pytest.raises(ValueError, match=f"{name}.gguf must be one of the parts 1 to"):
        Checkpoint(tmp_path / f"{name}.gguf")


def replaced(tensors, **changes):
    kind, shape, content = tensors["blk.0.ffn_up_exps.weight"]
    new = changes.get("kind", kind), changes.get("shape", shape), changes.get("content", content)
    return tensors | {"blk.0.ffn_up_exps.weight": new}


@pytest.mark.parametrize(
    ("fields", "tensors", "options", "message"),
    [
        ({}, {}, {"version": 1}, "must have version 2 or 3 of GGUF, got 1"),
        ({}, {}, {"version": 3 << 24}, "got a big-endian file"),
        ({}, {}, {"magic": b"GGML"}, "must begin with 'GGUF', got b'GGML'"),
        ({"general.alignment": 24}, {}, {}, "general.alignment of .* must be a power of two"),
        ({"general.type": "adapter"}, {}, {}, "must hold a model, got a LoRA adapter"),
        ({"general.type": "imatrix"}, {}, {}, "must hold a model, got an importance matrix"),
        (
            {"general.architecture": "clip"},
            {},
            {},
            "must hold a model, got a multimodal projector",
        ),
        ({"qwen3moe.expert_count": 4}, {}, {}, "_exps.weight in .* must have 4 experts, as"),
        ({"qwen3moe.expert_count": "3"}, {}, {}, "expert_count of .* must be a positive integer"),
        (
            {"general.architecture": 7},
            {},
            {},
            "general.architecture of .* must be a string, got 7",
        ),
        ({}, {"kind": 33}, {}, "ffn_up_exps.weight in .*got type 33 of ggml"),
        ({}, {"kind": 99}, {}, "ffn_up_exps.weight in .*got type 99 of ggml"),
        ({}, {"kind": "Q4_K", "shape": (E, N, 96)}, {}, "must have a multiple of 256 columns"),
        ({}, {"shape": (E, N, 0)}, {}, "ffn_up_exps.weight in .* must have elements"),
        ({}, {"shape": (E, N, 2 * K)}, {}, "must lie behind the tensor before it"),
        ({}, {"shape": (2**30, 2**30, K)}, {}, "must have elements, got shape"),
        ({}, {"shape": (1, 1, E, N, K)}, {}, "must have 1 to 4 dimensions, got 5"),
        ({}, {"shape": (E, N * K)}, {}, r"ffn_up_exps.* must be \(experts, rows, columns\)"),
        ({}, {"kind": "Q4_1"}, {}, "must lie behind the tensor before it"),
    ],
)
def test_refused(fields, tensors, options, message, tmp_path):
    changed = replaced(experts("Q4_0"), **tensors)
    path = gguf.write(tmp_path / "model.gguf", FIELDS | fields, changed, **options)
    with pytest.raises(ValueError, match=message) as error:
        Checkpoint(path)
    assert str(path) in str(error.value)


def test_type_without_a_scheme_is_refused_where_it_is_read(tmp_path):
    size = E * N * K // 256 * 82
    tensors = replaced(experts("Q4_0"), kind="IQ2_S", content=bytes(size))
    path = gguf.write(tmp_path / "model.gguf", FIELDS, tensors)
    assert read(path, "ffn_down_exps").shape == (E, N, K)
    with pytest.raises(ValueError, match=r"ffn_up_exps.weight in .*model.gguf must .*got IQ2_S"):
        read(path, "ffn_up_exps")


def test_gate_and_up_of_two_types_are_refused(tmp_path):
    other = gguf.blocks("Q8_0", (E, N, K), np.random.default_rng(0))
    tensors = replaced(experts("Q4_0"), kind="Q8_0", content=other)
    path = gguf.write(tmp_path / "model.gguf", FIELDS, tensors)
    with pytest.raises(ValueError, match=r"ffn_up_exps.weight in .* must be stored like .*gate"):
        read(path, "ffn_gate_exps", "ffn_up_exps")


def test_scales_that_are_not_finite_are_refused(tmp_path):
    kind, shape, content = tensor("Q4_0")
    tensors = replaced(experts("Q4_0"), content=b"\x00\x7c" + content[2:])
    path = gguf.write(tmp_path / "model.gguf", FIELDS, tensors)
    with pytest.raises(ValueError, match=r"ffn_up_exps.weight in .*must be finite"):
        read(path, "ffn_up_exps")


@pytest.mark.parametrize("kept", [0, 3, 23, 40, 100, 4000, -1])
def test_truncated(kept, tmp_path):
    path = gguf.write(tmp_path / "model.gguf", FIELDS, experts("Q4_0"))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.gguf"):
        Checkpoint(path)


def test_cut_while_it_is_read(tmp_path, monkeypatch):
    fields = FIELDS | {"tokenizer.ggml.tokens": ["word"] * 50_000}
    path = gguf.write(tmp_path / "model.gguf", fields, experts("Q4_0"))
    string = reader._Reader.string

    def cut(self, what):
        os.truncate(path, 4096)
        return string(self, what)

    monkeypatch.setattr(reader._Reader, "string", cut)
    with pytest.raises(ValueError, match="model.gguf must go on after byte"):
        Checkpoint(path)


def test_bytes_behind_the_tensors_or_between_them_are_refused(tmp_path):
    path = gguf.write(tmp_path / "model.gguf", FIELDS, experts("Q8_0", (E, N, 96)))
    content = path.read_bytes()
    path.write_bytes(content + bytes(64))
    with pytest.raises(ValueError, match="ffn_down_exps.weight in .* must end the file"):
        Checkpoint(path)
    last = len(content) - 1  # 1224 bytes of a tensor leave padding
    path.write_bytes(content[:last] + b"\1")
    with pytest.raises(ValueError, match="ffn_down_exps.weight in .* must be followed by zeros"):
        Checkpoint(path)


def mutated(content, header, rng):
    """A file with a byte of its header changed, a part of it moved, or its end cut."""
    content = bytearray(content)
    at = rng.randrange(header)
    match rng.randrange(6):
        case 0 | 1:
            content[at] ^= 1 << rng.randrange(8)
        case 2:
            content[at] = rng.randrange(256)
        case 3:
            at -= at % 4
            content[at : at + 4] = rng.randrange(2**32).to_bytes(4, "little")
        case 4:
            other, count = rng.randrange(header), rng.randrange(1, 24)
            content[at : at + count] = content[other : other + count]
        case 5:
            del content[at : at + rng.randrange(1, 64)]
    return bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "gpt_oss-MXFP4_MOE"])
def test_mutations_give_what_the_file_states_or_an_error(name, tmp_path):
    whole = (FIXTURES / name / "model.gguf").read_bytes()
    _, tensors, places = gguf.read(whole)
    header = max(places.values()) + 80
    rng, path = random.Random(0), tmp_path / "model.gguf"
    outcomes = {"error": 0, "values": 0}
    for _ in range(1000):
        content = mutated(whole, header, rng)
        path.write_bytes(content)
        try:
            checkpoint = Checkpoint(path)
        except ValueError as error:
            assert "model.gguf" in str(error)
            outcomes["error"] += 1
            continue
        _, said, _ = gguf.read(content)
        entries = checkpoint.files.entries
        assert [e.name for e in entries.values()] == [*said]
        for entry, (kind, shape, data) in zip(entries.values(), said.values(), strict=True):
            assert entry.bytes == len(data) and entry.shape[:-1] == shape[:-1]
            assert content[entry.begin : entry.begin + entry.bytes] == data
            assert (entry.blocks or "F32") == kind
        outcomes["values"] += 1
    assert min(outcomes.values()) > 50, outcomes
