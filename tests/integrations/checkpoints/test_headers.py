"""Headers of safetensors files: refused where the safetensors library refuses them."""

import copy
import json
import random
import struct

import pytest
import torch

library = pytest.importorskip("safetensors")

from moe_ops.integrations.checkpoints.files import TensorFiles

TENSORS = {
    "a": torch.randn(4, 8),
    "b": torch.randn(3, 5).bfloat16(),
    "c.d": torch.randint(0, 99, (7,), dtype=torch.int64),
    "e": torch.empty(0, 4),
    "f": torch.tensor(3.0),
}


def written():
    """The header of TENSORS in a file, and their data."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, t in TENSORS.items():
        dtype = {torch.bfloat16: "BF16", torch.int64: "I64"}.get(t.dtype, "F32")
        part = t.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": offsets}
        data += part
    return header, data


def write(file, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def accepted(file):
    """Whether the library accepts a file."""
    try:
        with library.safe_open(file, "pt"):
            return True
    except library.SafetensorError:
        return False


def entry(name, **fields):
    def change(header):
        header[name] |= fields

    return change


def twice(header):
    """A second "a" behind the first, with the bytes of "b"."""
    second = json.dumps({"a": header["b"]})[1:]
    return json.dumps(header)[:-1].encode() + b", " + second.encode()


def without(name):
    return lambda header: header.pop(name) and None


DAMAGED = {
    "begins in the header": (
        entry("a", data_offsets=[-64, 64]),
        "a in .* must lie behind the header, .*got -64 to 64",
    ),
    "same bytes": (
        entry("c.d", data_offsets=[0, 56]),
        "a in .* must lie behind c.d, from byte 56 of the data on, got 0 to 128",
    ),
    "a hole": (without("b"), "c.d in .* must lie behind a, from byte 128 of the data on, got 158"),
    "a hole at the end": (
        without("f"),
        "e in .* must end with the file, at byte 218 of the data, got 214",
    ),
    "no tensors but data": (lambda header: b"{}", "the header in .* must end with the file"),
    "name twice": (twice, "header of .* the name 'a' stands twice"),
    "wrong dtype": (
        entry("a", dtype="F64"),
        "data_offsets of a in the header of .* must span 256 bytes, as F64 .*got 0 to 128",
    ),
    "wrong shape": (entry("a", shape=[4, 9]), "data_offsets of a in .* must span 144 bytes"),
    "negative sizes": (
        entry("a", shape=[-4, -8]),
        r"shape of a in .* must be a list of sizes, got \[-4, -8\]",
    ),
    "sizes overflow": (
        entry("e", shape=[2**61, 8, 0]),
        "shape of e in .* must be a list of sizes",
    ),
    "text shape": (entry("a", shape=["4", "8"]), "shape of a in .* must be a list of sizes"),
    "shape of floats": (entry("a", shape=[4.0, 8.0]), "shape of a in .* must be a list of sizes"),
    "shape of booleans": (entry("f", shape=[True]), "shape of f in .* must be a list of sizes"),
    "shape is a number": (entry("a", shape=32), "shape of a in .* must be a list of sizes"),
    "offsets of floats": (
        entry("a", data_offsets=[0.0, 128.0]),
        r"data_offsets of a in .* must be \[begin, end\]",
    ),
    "three offsets": (
        entry("a", data_offsets=[0, 0, 128]),
        r"data_offsets of a in .* must be \[begin, end\]",
    ),
    "ends before it begins": (
        entry("e", data_offsets=[214, 210]),
        "data_offsets of e in .* must span 0 bytes",
    ),
    "dtype is a number": (entry("a", dtype=32), "dtype of a in .* must be a string, got 32"),
    "no dtype": (lambda header: header["a"].pop("dtype") and None, "dtype of a in .*got None"),
    "a number": (lambda header: header.update(a=3), "dtype of a in .* must be a string"),
    "metadata of numbers": (
        lambda header: header["__metadata__"].update(x=1),
        "__metadata__ in .* must hold strings",
    ),
    "metadata is a list": (
        lambda header: header.update(__metadata__=[]),
        "__metadata__ in .* must hold strings",
    ),
    "not an object": (lambda header: b"[]", "header of .* must be a JSON object, got a list"),
    "nested too deeply": (lambda header: b"[" * 100_000, "header of .* must be JSON"),
    "not UTF-8": (lambda header: json.dumps(header).encode("utf-16"), "header of .* must be JSON"),
    "half a surrogate pair": (
        lambda header: header.update({"\ud800": header.pop("f")}),
        "header of .* must be JSON",
    ),
    "more text": (lambda header: json.dumps(header).encode() + b"x", "header of .* must be JSON"),
    "too large": (
        lambda header: json.dumps(header).encode() + b" " * 100_000_000,
        "header of .* must have at most 100000000 bytes",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused(case, tmp_path):
    """By name, as the library refuses them."""
    (change, message), file = DAMAGED[case], tmp_path / "model.safetensors"
    header, data = written()
    write(file, change(header) or header, data)
    assert not accepted(file)
    with pytest.raises(ValueError, match=message) as raised:
        TensorFiles(file)
    assert str(file) in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "0 bytes without a header"),
        (7, "7 bytes without"),
        (100, "100 bytes without"),
        (-1, "f in .*is truncated"),
    ],
)
def test_cut_files_are_refused(size, message, tmp_path):
    file = tmp_path / "model.safetensors"
    write(file, *written())
    file.write_bytes(file.read_bytes()[:size])
    assert not accepted(file)
    with pytest.raises(ValueError, match=message):
        TensorFiles(file)


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_a_name_stands_once(tmp_path):
    """Also where the second entry is right: the format forbids it, and readers disagree."""
    header, data = written()
    text = json.dumps({"b": header["a"]})[:-1].encode() + b", " + json.dumps(header).encode()[1:]
    write(tmp_path / "model.safetensors", text, data)
    with pytest.raises(ValueError, match="the name 'b' stands twice"):
        TensorFiles(tmp_path / "model.safetensors")


VALUES = [None, True, -1, 0, 1, 4, 8, 32, 128, 2**64, 1.5, "F32", "U8", "I64", "X9", [], [4], {}]


def mutated(rng):
    """The header and data of TENSORS with one to three random changes."""
    header, data = copy.deepcopy(written())
    for _ in range(rng.randint(1, 3)):
        where = header[rng.choice(sorted(header))]
        kind = rng.randrange(5)
        if kind == 0 and where:
            where[rng.choice(sorted(where))] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 1 and isinstance(where.get("data_offsets"), list):
            where["data_offsets"] = [i + rng.choice((-64, -4, 0, 4)) for i in (0, 128)]
        elif kind == 2 and isinstance(where.get("shape"), list):
            rng.shuffle(where["shape"])
        elif kind == 3:
            names = rng.sample(sorted(header), 2)
            header |= {names[0]: header[names[1]], names[1]: header[names[0]]}
        else:
            data = data[: rng.randrange(len(data))] if rng.randrange(2) else data + bytes(4)
    return header, data


def test_random_changes_of_a_header(tmp_path):
    """Refused, or every tensor is what the library reads; refused wherever the library refuses
    what torch could hold.
    """
    rng, file, both = random.Random(0), tmp_path / "model.safetensors", 0
    for _ in range(400):
        header, data = mutated(rng)
        write(file, header, data)
        try:
            found = TensorFiles(file)
        except ValueError as error:
            assert str(file) in str(error)
            assert not accepted(file)
            continue
        if found.unknown and not accepted(file):
            continue  # a dtype that the library does not know either
        both += 1
        with library.safe_open(file, "pt") as f:
            assert set(f.keys()) == set(found.entries) | set(found.unknown)
            for name in found.entries:
                want, got = f.get_tensor(name), found.read(name)
                assert got.dtype == want.dtype and got.shape == want.shape
                assert torch.equal(bytes_of(got), bytes_of(want))
    assert both > 20
