"""Experts that threads read, many at a time: the bits, the errors and the memory."""

import copy
import dataclasses
import json
import os
import threading
import weakref

import numpy as np
import pytest
import torch

from tests.integrations.checkpoints.test_checkpoints import PREFIX, same
from tests.support.writers import GPTQ, NVFP4, WRITERS, ChannelFP8

files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint, loading, reading
from moe_ops.integrations.checkpoints.headers import Entry
from moe_ops.integrations.checkpoints.packings import octets
from moe_ops.integrations.checkpoints.reading import Piece, for_each
from moe_ops.integrations.checkpoints.stacks import Stack

E, I, K = 12, 128, 256


def write(folder, writer, change=None):
    """A file with E experts, all of different values."""
    writer, tensors = copy.deepcopy(writer), {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        for e in range(E):
            n, k = (K, I) if name == "down_proj" else (I, K)
            for part, t in writer.matrix(n, k)[0].items():
                tensors[f"{PREFIX}.{e}.{name}.{part}"] = t.contiguous()
    if change:
        change(tensors)
    files.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": writer.config}))
    return Checkpoint(folder)


@pytest.fixture
def threads(monkeypatch):
    """Sets how many there are."""
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


@pytest.mark.parametrize("form", WRITERS)
def test_many_experts_at_a_time_have_the_bits_of_one(form, threads, tmp_path, monkeypatch):
    checkpoint, found = write(tmp_path, WRITERS[form]), []
    for count, beside in ((1, 1), (5, loading._BESIDE)):
        threads(count)
        monkeypatch.setattr(loading, "_BESIDE", beside)  # bytes: one expert at a time, or all
        found += [
            checkpoint.expert_weight(PREFIX),
            checkpoint.expert_weight(PREFIX, ("down_proj",), expert_ids=range(1, E, 2)),
        ]
        sources = checkpoint.find(PREFIX, ("gate_proj", "up_proj")).sources
        if not form.startswith("fp8_block"):  # rows that take turns cannot share scales
            found.append(checkpoint.load(checkpoint.plan("w13", sources, in_turn=True)))
    half = len(found) // 2
    for want, got in zip(found[:half], found[half:], strict=True):
        assert len({t.tobytes() for t in want.qdata.view(torch.uint8).numpy()}) == len(want)
        same(got, want)


def test_plain_experts(threads, tmp_path):
    tensors = {
        f"{PREFIX}.{e}.{name}.weight": torch.randn(I, K).bfloat16()
        for e in range(E)
        for name in ("gate_proj", "up_proj")
    }
    files.save_file(tensors, tmp_path / "model.safetensors")
    threads(4)
    with torch.inference_mode():  # in which threads are not
        got = Checkpoint(tmp_path, {}).expert_weight(PREFIX)
    gate, up = (
        torch.stack([tensors[f"{PREFIX}.{e}.{name}.weight"] for e in range(E)])
        for name in ("gate_proj", "up_proj")
    )
    assert torch.equal(got, torch.cat([gate, up], 1))


def test_words_that_threads_turn_in_inference_mode(threads, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_SHARE", 2**12)
    checkpoint = write(tmp_path, GPTQ())
    threads(4)
    want = checkpoint.expert_weight(PREFIX)
    with torch.inference_mode():
        same(checkpoint.expert_weight(PREFIX), want)


class TensorFP8(ChannelFP8):
    """One fp32 scale for each matrix."""

    config = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
    }

    def matrix(self, n, k):
        parts, _ = super().matrix(n, k)
        scales = {name: torch.tensor(0.5) for name in ("weight_scale", "input_scale")}
        return parts | scales, None


def disorder(tensors):
    for e in (5, 9):
        order = torch.randperm(K)
        name = f"{PREFIX}.{e}.up_proj.g_idx"
        tensors[name] = tensors[name][order].contiguous()


def spoil(tensors):
    for e in (9, 5):
        tensors[f"{PREFIX}.{e}.up_proj.weight_scale"].view(torch.uint8)[3, 1] = 127


def differ(tensors):
    for e in (5, 9):
        tensors[f"{PREFIX}.{e}.up_proj.weight_scale"].mul_(1.5)


def lose(tensors):
    for e in (9, 5):
        for name in ("gate_proj", "up_proj"):
            tensors[f"{PREFIX}.{e}.{name}.weight_scale"].fill_(torch.nan)


ERRORS = {
    "found by a conversion": (GPTQ(), disorder, r"\.5\.up_proj.qweight in .*act-order"),
    "found in the stack": (NVFP4(), spoil, r"\.5\.up_proj.weight_packed in .*: scale must be fi"),
    "found between projections": (
        TensorFP8(),
        differ,
        r"\.5\.gate_proj.weight in .* must have the scale of the other projections",
    ),
    "of numbers that are none": (
        TensorFP8(),
        lose,
        r"\.5\.gate_proj.weight in .*: scale must be finite, got NaN",
    ),
}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("case", ERRORS)
def test_the_first_error_names_its_tensor_and_no_thread_is_left(case, count, threads, tmp_path):
    writer, change, message = ERRORS[case]
    threads(count)
    checkpoint = write(tmp_path, writer, change)
    weight = checkpoint.find(PREFIX, ("gate_proj", "up_proj"))
    with pytest.raises(ValueError, match=message):
        checkpoint.load(weight)
    assert not any(t.name.startswith("moe_ops") for t in threading.enumerate())


def test_a_file_that_is_cut_while_it_is_read(threads, tmp_path):
    checkpoint = write(tmp_path, WRITERS["fp8_block"])
    file = tmp_path / "model.safetensors"
    last = max(checkpoint.files.entries.values(), key=lambda entry: entry.begin)
    cut = file.read_bytes()[: last.begin + last.bytes - 1]
    file.write_bytes(cut)
    threads(4)
    projection = last.name.split(".")[-2]
    with pytest.raises(ValueError, match=f"{last.name} in .* ends early"):
        checkpoint.expert_weight(PREFIX, (projection,))
    assert not any(t.name.startswith("moe_ops") for t in threading.enumerate())


def test_after_an_error_no_more_experts_are_begun():
    begun, enough = [], threading.Event()

    def work(e):
        begun.append(e)
        if e == 0:
            raise ValueError("the first")
        enough.wait(0.05)

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(ValueError, match="the first"):
            for_each(work, range(1000), "test")
    finally:
        torch.set_num_threads(before)
    assert len(begun) < 50


@pytest.mark.parametrize(
    ("form", "converted"), [("fp8_block", 0), ("ct_int4", 0), ("gptq4_sym", 2)]
)
def test_few_experts_are_held_beside_the_weight(form, converted, threads, tmp_path, monkeypatch):
    """Of elements that need no conversion none, but of the expert that shows how they lie."""
    checkpoint = write(tmp_path, WRITERS[form])
    entries = checkpoint.files.entries
    elements = {name for name in entries if name.endswith((".weight", "_packed", ".qweight"))}
    whole = sum(
        entry.bytes
        for name, entry in entries.items()
        if name.startswith(f"{PREFIX}.0.") and "down_proj" not in name
    )
    monkeypatch.setattr(loading, "_BESIDE", 2 * whole)
    read, begun = reading.read_pieces, []

    def watched(pieces):
        pieces = [piece for piece in pieces if piece.entry.name in elements]
        begun.append([piece.place.ctypes.data for piece in pieces])

    monkeypatch.setattr(reading, "read_pieces", lambda p: read(pieces := [*p]) or watched(pieces))
    threads(3)
    qdata = checkpoint.expert_weight(PREFIX).qdata
    # gate and up of the first expert, and then of two at a time, or all into their places
    begun = [places for places in begun if places]
    counts = [2, 4, 4, 4, 4, 4, 2] if converted else [2, 2 * (E - 1)]
    assert [len(places) for places in begun] == counts
    inside = range(qdata.data_ptr(), qdata.data_ptr() + qdata.nbytes)
    assert converted or all(place in inside for place in begun[1])


def test_what_was_converted_is_let_go_before_more_is_read(tmp_path, monkeypatch):
    checkpoint = write(tmp_path, WRITERS["gptq4_sym"])
    monkeypatch.setattr(loading, "_BESIDE", 1)
    read_alike, read, counts = loading.Loader._read_alike, [], []

    def watched(*args):
        counts.append(sum(ref() is not None for ref in read))
        tensors = read_alike(*args)
        read.extend(weakref.ref(t) for parts in tensors for t in parts.values())
        return tensors

    monkeypatch.setattr(loading.Loader, "_read_alike", watched)
    checkpoint.expert_weight(PREFIX)
    assert counts == [0] * E


def test_experts_that_are_stored_in_another_way(tmp_path):
    """Scales of one expert have another dtype, which become fp32 as those of the others."""

    def change(tensors):
        for e in (3, 4, E - 1):
            name = f"{PREFIX}.{e}.up_proj.weight_scale_inv"
            tensors[name] = tensors[name].bfloat16()

    checkpoint = write(tmp_path, WRITERS["fp8_block"], change)
    weight = checkpoint.expert_weight(PREFIX)
    for e in range(E):
        for i, name in enumerate(("gate_proj", "up_proj")):
            scale = checkpoint.files.read(f"{PREFIX}.{e}.{name}.weight_scale_inv").float()
            data = checkpoint.files.read(f"{PREFIX}.{e}.{name}.weight")
            assert torch.equal(weight.scale[e].chunk(2)[i], scale)
            got = weight.qdata[e].chunk(2)[i]
            assert torch.equal(got.view(torch.uint8), data.view(torch.uint8))


def test_numbers_of_whole_matrices_and_rows_in_turn():
    stack = Stack(3, in_turn=True)
    parts = [
        {
            "qdata": 10 * torch.arange(3.0).view(3, 1, 1).expand(3, 2, 3) + p,
            "scale": torch.arange(3.0),
        }
        for p in (0, 1)
    ]
    for some in (slice(0, 1), slice(1, 3)):
        stack.put(some, [{name: t[some] for name, t in of.items()} for of in parts])
    rows = [[0, 1, 0, 1], [10, 11, 10, 11], [20, 21, 20, 21]]
    assert stack.tensors["qdata"][:, :, 0].tolist() == rows
    assert stack.tensors["scale"].tolist() == [0, 1, 2]
    place = stack.places(slice(1, 2))[0]["qdata"]
    assert np.shares_memory(place.numpy(), stack.tensors["qdata"].numpy())


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_pieces_of_files(at_once, count, threads, tmp_path, monkeypatch):
    """In any order, next to each other, near and far apart, longer than a share, and of two
    files; also where the system reads into one place at a time, and less than it is asked for.
    """
    if not at_once:
        monkeypatch.setattr(
            reading,
            "_read_some",
            lambda f, begin, places: os.preadv(f.fileno(), [places[0][:999]], begin),
        )
    threads(count)
    data = np.random.default_rng(0).integers(0, 256, (2, 3 * 2**20), np.uint8)
    pieces = []
    for i, content in enumerate(data):
        file = tmp_path / str(i)
        file.write_bytes(content.tobytes())
        entry = Entry(f"tensor{i}", file, torch.uint8, content.shape, 0)
        bounds = [0, 7, 7, 20, 60, 5000, 9000, len(content) - 100, len(content)]
        spans = [*zip(bounds, bounds[1:], strict=False)]
        for begin, end in (spans[j] for j in (6, 0, 1, 5, 3, 7)):  # neither 7..20 nor 60..5000
            pieces.append(Piece(entry, begin, np.zeros(end - begin, np.uint8)))
    reading.read_pieces(pieces)
    for entry, begin, place in pieces:
        assert np.array_equal(place, data[int(entry.name[-1])][begin : begin + len(place)])
    beyond = Piece(entry, len(content) - 50, np.zeros(51, np.uint8))
    with pytest.raises(ValueError, match="tensor1 in .* ends early"):
        reading.read_pieces([*pieces, beyond])
    # the file ends between two pieces that are read at once
    whole = Piece(entry, len(content) - 20, np.zeros(10, np.uint8))
    absent = dataclasses.replace(entry, name="missing")
    missing = Piece(absent, len(content) + 20, np.zeros(10, np.uint8))
    with pytest.raises(ValueError, match="missing in .* ends early"):
        reading.read_pieces([whole, missing])


def test_words_in_their_order_are_not_copied():
    """Also where they lie among the rows of another projection."""
    words = torch.arange(3 * 8 * 4, dtype=torch.int32).view(3, 8, 4)
    codes = octets(words[:, :5], -1)
    assert codes.data_ptr() == words.data_ptr() and codes.shape == (3, 5, 16)
    turned = octets(words[:, :5], 1)
    assert torch.equal(turned.view(torch.int32), words[:, :5].mT)
