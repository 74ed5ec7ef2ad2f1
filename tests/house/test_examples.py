"""Every example runs from a fresh process and finds all its claims true, at its smallest
settings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_ops
from tests.support.paths import EXAMPLES

# name -> (arguments, how many claims it checks at least, what else it needs)
RUNS = {
    "compile_layer": (("--layers", "2"), 9, ()),
    "cuda_graph_decode": (("--tokens", "4"), 0, ("transformers",)),
    "export_layer": (("--schemes", "fp8_block"), 6, ()),
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
    "padded_batch": ((), 3, ("transformers",)),
    "quantize_and_compare": (
        ("--perplexity-bytes", "2048", "--schemes", "fp8_block,int4_w4a16,mxfp4,nvfp4"),
        4,
        ("transformers",),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_example(name):
    arguments, claims, needs = RUNS[name]
    for library in needs:
        pytest.importorskip(library)
    package = str(Path(moe_ops.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    answer = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    output = answer.stdout
    assert answer.returncode == 0, f"{output}\n{answer.stderr}"
    assert "FAILED" not in output
    assert len(re.findall(r"^  ok ", output, re.M)) >= claims, output
    if name == "cuda_graph_decode":
        assert "needs a GPU" in output
    if name == "generate":
        assert re.search(r"^ *fp8_channel .*\d", output, re.M), output
