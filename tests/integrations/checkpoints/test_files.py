"""Which files and tensors of a checkpoint count: its index is the truth."""

import json
import os

import pytest
import torch

files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.checkpoints.files import INDEX, TensorFiles, quantization_config

E, N, K = 4, 16, 32
EXPERTS = "model.layers.0.mlp.experts"


def name_of(expert):
    return f"{EXPERTS}.{expert}.down_proj.weight"


def shards(folder, experts=E):
    """Files of two experts each with an index; returns the weight (E, N, K)."""
    whole, listed = torch.randn(experts, N, K), {}
    for e in range(experts):
        listed[name_of(e)] = f"model-{e // 2 + 1:05}-of-{experts // 2:05}.safetensors"
    for file in set(listed.values()):
        names = [n for n, f in listed.items() if f == file]
        files.save_file({n: whole[int(n.split(".")[5])] for n in names}, folder / file)
    write_index(folder, listed)
    return whole


def write_index(folder, listed, name=INDEX):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def listed_in(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def read(path):
    return Checkpoint(path).expert_weight(EXPERTS, ("down_proj",))


def test_files_and_tensors_that_the_index_does_not_name_are_left_out(tmp_path):
    whole = shards(tmp_path)
    stale = {name_of(e): torch.zeros(N, K) for e in range(E + 2)}
    files.save_file(stale, tmp_path / "old.safetensors")
    files.save_file(stale, tmp_path / "a.safetensors")  # first and last in alphabetical order
    file = tmp_path / listed_in(tmp_path)[name_of(0)]
    more = files.load_file(file) | {name_of(E): torch.zeros(N, K), name_of(3): torch.zeros(N, K)}
    files.save_file(more, file)
    for path in (tmp_path, str(tmp_path), tmp_path / INDEX):
        assert torch.equal(read(path), whole)
    # the files of the index one by one, as others find them
    paths = sorted({tmp_path / f for f in listed_in(tmp_path).values()})
    assert torch.equal(read(paths), whole) and torch.equal(read(paths[::-1]), whole)
    assert [str(e) for e in TensorFiles(paths).repeated] == [f"{name_of(3)} in {file}"]


def test_a_missing_file_of_the_index_is_named(tmp_path):
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = rf"{INDEX} names must be there, got none at .*model-00002-of-00002.safetensors"
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="got none at .*model-00002-of-00002.safetensors"):
        Checkpoint([tmp_path / f for f in set(listed_in(tmp_path).values())])


def test_what_a_folder_has_instead_is_named(tmp_path):
    (tmp_path / "model.gguf").touch()
    for path, has in (
        (tmp_path, r"which has model.gguf: name one of them"),
        (tmp_path / "absent", "which does not exist"),
        (None, "got None"),
    ):
        with pytest.raises(ValueError, match=f"path must be a folder.*{has}"):
            Checkpoint(path)
    shards(tmp_path)
    with pytest.raises(ValueError, match="projections must be a tuple of names, got 'down_proj'"):
        Checkpoint(tmp_path).expert_weight(EXPERTS, "down_proj")


def test_a_missing_tensor_of_the_index_is_named(tmp_path):
    shards(tmp_path)
    write_index(tmp_path, listed_in(tmp_path) | {name_of(4): "model-00001-of-00002.safetensors"})
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002.safetensors must hold .*experts.4.down_proj"
    ):
        Checkpoint(tmp_path)


DAMAGED_INDICES = {
    "{": f"{INDEX} must be JSON",
    "[" * 100_000: f"{INDEX} must be JSON, got a damaged file: maximum recursion depth",
    "[]": f"{INDEX} must be a JSON object, got a list",
    "{}": f"weight_map of .*{INDEX} must be an object of tensors and .*got None",
    '{"weight_map": [1]}': rf"weight_map of .*{INDEX} must be .*got \[1\]",
    '{"weight_map": {"a": 1}}': f"weight_map of .*{INDEX} must be .*got {{'a': 1}}",
    '{"weight_map": {}}': f"weight_map of .*{INDEX} must be .*got {{}}",
    '{"weight_map": {"a": "x", "a": "y"}}': f"{INDEX} must be JSON, .*the name 'a' stands twice",
}


def test_no_files():
    with pytest.raises(ValueError, match="path must be a folder, a file or a list of files, got"):
        Checkpoint([])


@pytest.mark.parametrize("text", DAMAGED_INDICES, ids=lambda text: text[:40])
def test_damaged_indices(text, tmp_path):
    shards(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=DAMAGED_INDICES[text]):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_names_files_in_its_folder(absolute, tmp_path):
    """Files elsewhere are refused by name; those in folders inside and links to others count, as
    in the Hub's cache.
    """
    folder, outside = tmp_path / "model", tmp_path / "blobs"
    folder.mkdir(), outside.mkdir()
    whole = shards(folder)
    name = "model-00001-of-00002.safetensors"
    (folder / name).rename(outside / "1f0a")
    other = str(outside / "1f0a") if absolute else "../blobs/1f0a"
    listed = listed_in(folder)
    write_index(folder, {n: other if f == name else f for n, f in listed.items()})
    with pytest.raises(ValueError, match=f"{INDEX} must name files in its folder, got '{other}'"):
        Checkpoint(folder)
    write_index(folder, {n: f"part/{f}" for n, f in listed.items()})
    (folder / "part").mkdir()
    (folder / "part" / name).symlink_to(outside / "1f0a")
    (folder / "model-00002-of-00002.safetensors").rename(
        folder / "part" / name.replace("1-", "2-", 1)
    )
    (folder / INDEX).rename(outside / "77c2")
    (folder / INDEX).symlink_to("../blobs/77c2")
    assert torch.equal(read(folder), whole)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", INDEX, "config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused(name, make, tmp_path):
    """At once: reading from a pipe would wait for a writer."""
    shards(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    for has_index in (True, False):
        if not has_index and name != INDEX:
            (tmp_path / INDEX).unlink()
        with pytest.raises(ValueError, match=f"{name} must be a regular file, got something else"):
            Checkpoint(tmp_path)


def test_other_indices(tmp_path):
    """The index of another name counts if it is the only one."""
    whole = shards(tmp_path)
    write_index(tmp_path, {"x": "other.safetensors"}, "other.safetensors.index.json")
    assert torch.equal(read(tmp_path), whole)
    (tmp_path / INDEX).rename(tmp_path / "mine.safetensors.index.json")
    with pytest.raises(ValueError, match=r"one other index, got mine\.\S+, other\.\S+; give"):
        Checkpoint(tmp_path)
    assert torch.equal(read(tmp_path / "mine.safetensors.index.json"), whole)
    (tmp_path / "other.safetensors.index.json").unlink()
    assert torch.equal(read(tmp_path), whole)


def test_without_an_index(tmp_path):
    """Numbered files must all be there, no tensor may be in two, and experts must be complete."""
    whole = shards(tmp_path)
    (tmp_path / INDEX).unlink()
    assert torch.equal(read(tmp_path), whole)
    files.save_file({name_of(1): torch.zeros(N, K)}, tmp_path / "z.safetensors")
    message = rf"{name_of(1)} must be in one file, got it in .*-00001-of-.* and in .*z.safetensors"
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)
    (tmp_path / "z.safetensors").unlink()
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "first.safetensors")
    with pytest.raises(ValueError, match=r"must have 2 files model-\*-of-2.*none of number 1;"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("nested", [False, True])
def test_last_experts_missing(key, nested, tmp_path):
    """Without an index config.json tells how many there are; a file given by itself is enough."""
    whole = torch.randn(2, N, K)
    tensors = {name_of(e): whole[e] for e in range(2)}
    files.save_file(tensors, tmp_path / "model.safetensors")
    config = {"text_config": {key: E}} if nested else {key: E}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="must have 4 experts, as .*config.json says, got .* 0 to 1"
    ):
        read(tmp_path)
    assert torch.equal(read(tmp_path / "model.safetensors"), whole)
    sparse = {"moe_sparsity_config": {"method": "prune", "num_experts": [2]}}
    config |= {"quantization_config": {"quant_method": "compressed-tensors"} | sparse}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(read(tmp_path), whole)


@pytest.mark.parametrize("numbers", [(1, 2, 3), (0, 2, 3), (0, 1, 4)])
def test_gaps_in_the_numbers_of_experts(numbers, tmp_path):
    tensors = {name_of(e): torch.randn(N, K) for e in numbers}
    files.save_file(tensors, tmp_path / "model.safetensors")
    gap = str(sorted(set(range(max(numbers))) - set(numbers)))
    message = f"experts 0 to {max(numbers)}, got none of experts " + gap.replace("[", r"\[")
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_stacks_beside_single_experts(tmp_path):
    shards(tmp_path)
    (tmp_path / INDEX).unlink()
    stack = {f"{EXPERTS}.down_proj": torch.zeros(E, N, K)}
    files.save_file(stack, tmp_path / "stack.safetensors")
    with pytest.raises(ValueError, match="as stacks or expert by expert, got both.*down_proj$"):
        read(tmp_path)


def test_dtypes_that_torch_lacks(tmp_path):
    tensors = {name_of(0): torch.zeros(4, 4, dtype=torch.uint8), "other": torch.zeros(4, 4)}
    files.save_file(tensors, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes().replace(b'"U8"', b'"X8"')
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"{name_of(0)} in .* must have a dtype that torch has"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "want"),
    [
        ("config.json", {"a_config": {"b_config": {"quantization_config": {"x": 1}}}}, {"x": 1}),
        ("config.json", {"compression_config": {"x": 1}}, {"x": 1}),
        (
            "hf_quant_config.json",
            {"producer": {}, "quantization": {"quant_algo": "FP8"}},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        ("quantize_config.json", {"bits": 8}, {"quant_method": "gptq", "bits": 8}),
        ("quant_config.json", {"w_bit": 4}, {"quant_method": "awq", "w_bit": 4}),
    ],
)
def test_where_the_configuration_stands(file, text, want, tmp_path):
    (tmp_path / file).write_text(json.dumps(text))
    assert quantization_config(tmp_path) == (want, tmp_path / file)
    (tmp_path / file).write_text("{")
    with pytest.raises(ValueError, match=f"{file} must be JSON"):
        quantization_config(tmp_path)
