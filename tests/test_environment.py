"""The machine around the package: what is logged at an import, and progress bars."""

import io
import logging
from contextlib import redirect_stderr

import pytest
import torch

import moe_ops
from moe_ops import environment
from tests.house.test_documents import run_python

TORCHAO = logging.getLogger("torchao")
PYTREE = logging.getLogger("torch.utils._pytree")
DEPRECATED = "%s is an Enum subclass. Calling register_constant() on Enum subclasses is deprecated"


def of_module(module):
    return type("Preference", (), {"__module__": module})


@pytest.mark.sweep
@pytest.mark.slow  # fresh processes, 5 s each
@pytest.mark.parametrize(
    "use",
    [
        "import moe_ops.tensors",
        "import moe_ops.integrations.torchao",
        "import moe_ops.integrations.checkpoints",
        "import moe_ops.integrations.transformers",
        "import moe_ops; moe_ops.MoELayer(8, 8, 2, 1)",
        "import torch, moe_ops; moe_ops.quantize(torch.randn(2, 128, 128), 'fp8_block')",
    ],
)
def test_first_use_prints_nothing(use):
    if "transformers" in use:
        pytest.importorskip("transformers")
    assert run_python(f"import sys; sys.stderr = sys.stdout\n{use}") == ""


def test_what_users_of_torchao_can_do_nothing_about_is_left_out(monkeypatch, tmp_path, caplog):
    cuda, other = tmp_path / "_C_cuda.so", tmp_path / "_C.so"
    cuda.write_bytes(b"\x7fELF libc10.so libcudart.so.13")
    other.write_bytes(b"\x7fELF libc10.so")

    def logged():
        caplog.clear()
        for logger in (TORCHAO, PYTREE):
            logger.setLevel(logging.WARNING)
        for file in (cuda, other):
            TORCHAO.warning(f"Failed to load {file}: Could not load this library")
        TORCHAO.warning("Skipping import of cpp extensions due to incompatible torch version.")
        PYTREE.warning(DEPRECATED, of_module("torchao.quantization"))
        PYTREE.warning(DEPRECATED, of_module("mine"))
        return [record.getMessage().split(":")[0] for record in caplog.records]

    everything = logged()
    assert len(everything) == 5
    monkeypatch.setattr(torch.version, "cuda", None)
    with environment.importing_torchao():
        assert logged() == [everything[i] for i in (1, 2, 4)]
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # then it should have loaded
    with environment.importing_torchao():
        assert logged() == [everything[i] for i in (0, 1, 2, 4)]
    assert logged() == everything


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def at_once(monkeypatch):
    """Progress bars appear without delay."""
    monkeypatch.setattr(environment, "PROGRESS_SECONDS", 0.0)


def test_progress_is_shown_on_terminals_alone(at_once):
    with redirect_stderr(Terminal()) as terminal:
        assert list(environment.progress_bar(iter("abc"), "counting", 3)) == list("abc")
    assert "counting:   0%" in terminal.getvalue()
    with redirect_stderr(io.StringIO()):
        items = [1, 2]
        assert environment.progress_bar(items, "counting") is items


def test_what_is_quick_shows_no_progress():
    with redirect_stderr(Terminal()) as terminal:
        assert list(environment.progress_bar(range(3), "counting")) == [0, 1, 2]
    assert "counting" not in terminal.getvalue()


def test_quantizing_shows_progress(at_once, monkeypatch):
    weight = torch.randn(3, 8, 16)
    whole = moe_ops.quantize(weight, "fp8_channel")
    monkeypatch.setattr("moe_ops.numerics.weights._AT_ONCE", 1)  # one expert at a time
    with redirect_stderr(Terminal()) as terminal:
        quantized = moe_ops.quantize(weight, "fp8_channel")
    assert "quantizing" in terminal.getvalue()
    assert torch.equal(quantized.dequantize(), whole.dequantize())


def test_warming_up_shows_progress(at_once):
    with redirect_stderr(Terminal()) as terminal:
        moe_ops.warmup(moe_ops.MoELayer(16, 8, 4, 2), [1, 2])
    assert "warming up" in terminal.getvalue()


def test_models_and_checkpoints_show_progress(at_once, tmp_path):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    from moe_ops.integrations import checkpoints
    from moe_ops.integrations import transformers as moe_transformers

    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = [f"experts.{e}.{p}_proj.weight" for e in range(3) for p in ("gate", "up")]
    safetensors.save_file(
        {name: torch.randn(8, 16) for name in names}, tmp_path / "model.safetensors"
    )
    with redirect_stderr(Terminal()) as terminal:
        moe_transformers.fuse_routers(model)
        moe_transformers.quantize(model, "fp8_channel")
        checkpoints.Checkpoint(tmp_path).expert_weight("experts", scheme="fp8_channel")
    for what in ("attaching layers", "checking routers", "quantizing experts", "loading experts"):
        assert what in terminal.getvalue(), what
