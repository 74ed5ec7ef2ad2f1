"""Every example runs from a fresh process and finds all its claims true, at its smallest
settings."""

import argparse
import os
import random
import re
import runpy
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import moe_ops
from tests.support.paths import EXAMPLES

# transformers 5.23 brought it
HAS_EXPERT_PARALLEL = find_spec("transformers") and find_spec(
    "transformers.distributed.expert_parallel"
)
# name -> (arguments, how many claims it checks at least, what else it needs)
RUNS = {
    "compile_layer": (("--layers", "2"), 9, ()),
    "cuda_graph_decode": (("--tokens", "4"), 0, ("transformers",)),
    "expert_parallel": (("--text", "4"), 9 if HAS_EXPERT_PARALLEL else 3, ()),
    "export_layer": (("--schemes", "", "fp8_block"), 12, ()),
    "finetune": (("--steps", "3", "--rank", "2"), 4, ("transformers", "peft")),
    "generate": (
        (
            "--tokens",
            "2",
            "--perplexity-bytes",
            "256",
            "--schemes",
            "fp8_channel,nvfp4",
            "--no-compile-schemes",
        ),
        1,
        ("transformers",),
    ),
    "grpo": (("--group", "3", "--tokens", "8"), 3, ("transformers",)),
    "padded_batch": ((), 3, ("transformers",)),
    "quantize_and_compare": (
        ("--perplexity-bytes", "2048", "--schemes", "fp8_block,int4_w4a16,mxfp4,nvfp4"),
        4,
        ("transformers",),
    ),
    "qlora": (("--steps", "3", "--windows", "2"), 5, ("transformers", "peft")),
    "residency": (("--tokens", "3", "--slots", "2", "5"), 4, ("transformers",)),
    "torchtitan_experts": (
        ("--steps", "2", "--layers", "1", "--length", "16"),
        6,
        ("torchtitan",),
    ),
    "warmup_and_capture": ((), 9, ()),
    "train_step": (("--steps", "2"), 3, ("transformers", "peft")),
}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="sizes for a CPU; on a GPU run the examples themselves"
)


def test_every_example_is_run():
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"common"}
    assert files == set(RUNS)
    text = (EXAMPLES / "README.md").read_text()
    for name in files:
        assert f"{name}.py" in text, f"examples/README.md does not mention {name}.py"


def run(name, arguments):
    """An example in a fresh process, without Triton's interpreter."""
    package = str(Path(moe_ops.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    with warnings.catch_warnings():
        import common
    yield common
    del sys.modules["common"]


def test_the_tokenizer_of_the_tiny_model_maps_bytes():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLES / "tiny_moe")
    assert len(tokenizer) == 256 and tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    rng = random.Random(0)
    drawn = [chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(500)]
    for text in (
        "",
        " a  b\n\t",
        "don't .",
        "Āé 日本語 🎉",
        "".join(map(chr, range(256))),
        "".join(drawn),
    ):
        ids = tokenizer(text)["input_ids"]
        assert bytes(ids) == text.encode()
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("\0", "")
    data = bytes(range(255, 0, -1))
    assert tokenizer.decode(list(data)) == data.decode("utf-8", errors="replace")
    batch = tokenizer(["ab", "abcd"], padding=True)
    assert batch["input_ids"][0] == [97, 98, 0, 0] and batch["attention_mask"][0] == [1, 1, 0, 0]
    chat = [{"role": "user", "content": "class A:"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "class A:"
    # a server's answer is what comes after the prompt, though Qwen's models mark it
    answer = tokenizer.parse_response(list(b"pass"), prefix="class A:")
    assert answer == {"content": "pass"}


def test_the_tiny_model_runs_in_a_pipeline():
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLES / "tiny_moe")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLES / "tiny_moe")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    text, greedy = "class Queue:", {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(torch.tensor([list(text.encode())]), **greedy)[0]
    assert pipe(text, **greedy)[0]["generated_text"] == bytes(expected.tolist()).decode()


def test_schemes_of_command_lines(common):
    assert common.scheme_name("int4_w4a16") == "int4_w4a16:g128"
    assert common.scheme_name("") == ""
    assert common.scheme_names("fp8_block,nvfp4") == ["fp8_block", "nvfp4"]
    for parse, text, message in (
        (common.scheme_name, "fp8_blok", "got 'fp8_blok'; did you mean 'fp8_block'"),
        (common.scheme_name, "fp8_tensor_static", "'fp8_tensor_static' has static activation"),
        (common.scheme_names, "nvfp4,fp9", "got 'fp9'"),
        (common.scheme_names, "nvfp4,", "must be names between commas, got 'nvfp4,'"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("export_layer", "--schemes"),
        ("finetune", "--scheme"),
        ("generate", "--schemes"),
        ("quantize_and_compare", "--schemes"),
        ("residency", "--scheme"),
        ("train_step", "--scheme"),
    ],
)
def test_unknown_schemes_are_answered(name, option, common, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [name, option, "fp9_block"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    answer = capsys.readouterr()
    assert ended.value.code == 2
    assert f"error: argument {option}: scheme must be one of" in answer.err and not answer.out


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_example(name):
    arguments, claims, needs = RUNS[name]
    for library in needs:
        pytest.importorskip(library)
    answer = run(name, arguments)
    output = answer.stdout
    assert answer.returncode == 0, f"{output}\n{answer.stderr}"
    assert "FAILED" not in output
    assert len(re.findall(r"^  ok ", output, re.M)) >= claims, output
    if name == "cuda_graph_decode":
        assert "needs a GPU" in output
    if name == "generate":
        assert re.search(r"^ *fp8_channel .*\d", output, re.M), output
