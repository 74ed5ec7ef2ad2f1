"""Threads that read experts: the bits, the errors and the memory of one thread."""

import copy
import gc
import json
import threading
import weakref

import numpy as np
import pytest
import torch

from tests.support.writers import GPTQ, NVFP4, WRITERS, ChannelFP8

files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.checkpoints.stacks import Stack, for_each

E, I, K = 12, 128, 256
PREFIX = "model.layers.1.mlp.experts"


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


def bits(weight):
    names = weight.__tensor_flatten__()[0]
    return {n: getattr(weight, n).contiguous().view(-1).view(torch.uint8) for n in names}


@pytest.mark.parametrize("form", WRITERS)
def test_threads_read_the_bits_of_one(form, threads, tmp_path):
    checkpoint, found = write(tmp_path, WRITERS[form]), []
    for count in (1, 5):
        threads(count)
        found += [
            checkpoint.expert_weight(PREFIX),
            checkpoint.expert_weight(PREFIX, ("down_proj",), expert_ids=range(1, E, 2)),
        ]
        sources = checkpoint.find(PREFIX, ("gate_proj", "up_proj")).sources
        if not form.startswith("fp8_block"):  # rows that take turns cannot share scales
            found.append(checkpoint.load(checkpoint.plan("w13", sources, in_turn=True)))
    half = len(found) // 2
    for want, got in zip(found[:half], found[half:], strict=True):
        assert got.scheme == want.scheme and got.shape == want.shape
        wanted = bits(want)
        assert len({t.tobytes() for t in want.qdata.view(torch.uint8).numpy()}) == len(want)
        for name, t in bits(got).items():
            assert torch.equal(t, wanted[name]), name


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


ERRORS = {
    "found by a conversion": (GPTQ(), disorder, r"\.5\.up_proj.qweight in .*act-order"),
    "found in the stack": (NVFP4(), spoil, r"\.5\.up_proj.weight_packed in .*: scale must be fi"),
    "found between projections": (
        TensorFP8(),
        differ,
        r"\.5\.gate_proj.weight in .* must have the scale of the other projections",
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


@pytest.mark.parametrize(("form", "converted"), [("fp8_block", 0), ("gptq4_sym", 1)])
def test_each_thread_holds_one_matrix_beside_the_weight(
    form, converted, threads, tmp_path, monkeypatch
):
    """Of elements that need no conversion none, but of the expert that shows how they lie."""
    checkpoint, alive, most = write(tmp_path, WRITERS[form]), [], 0
    read, lock = checkpoint.files.read, threading.Lock()
    elements = ("weight", "qweight")

    def watched(name, device="cpu", *args, into=None):
        nonlocal most
        tensor = read(name, device, *args, into=into)
        if name.endswith(elements) and into is None:
            with lock:
                alive.append(weakref.ref(tensor))
                most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(checkpoint.files, "read", watched)
    threads(3)
    gc.collect()
    checkpoint.expert_weight(PREFIX)
    # gate and up of an expert, until it is in the stack
    assert most <= 2 * 3 if converted else len(alive) == 2
    assert not converted or len(alive) == 2 * E


def test_numbers_of_whole_matrices_and_rows_in_turn():
    stack = Stack(2, in_turn=True)
    parts = [
        [
            {"qdata": torch.full((2, 3), 10.0 * e + p), "scale": torch.tensor(float(e))}
            for p in (0, 1)
        ]
        for e in (0, 1)
    ]
    for e in (0, 1):
        stack.put(e, parts[e])
    assert stack.tensors["qdata"][:, :, 0].tolist() == [[0, 1, 0, 1], [10, 11, 10, 11]]
    assert stack.tensors["scale"].tolist() == [0, 1]
    assert np.shares_memory(stack.places(1)[0]["qdata"].numpy(), stack.tensors["qdata"].numpy())
