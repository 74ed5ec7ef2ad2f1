"""The machine around the package: what is logged at an import, and progress bars."""

import importlib
import importlib.machinery
import importlib.util
import io
import logging
import pkgutil
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
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
    with environment.importing_torchao(in_command=True), environment.importing_torchao():
        assert logged() == [everything[4]]
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


# --- what waits for an import --------------------------------------------------------------------


@pytest.fixture
def late(tmp_path, monkeypatch):
    """Writes a module that nobody has imported, and returns its name."""

    def write(text, folder=tmp_path):
        name = f"late_{tmp_path.name.replace('-', '_')}_{len(list(tmp_path.iterdir()))}"
        written.append(name)
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    written = []
    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in written:
        sys.modules.pop(name, None)
        environment._awaited.pop(name, None)


def test_what_waits_for_a_module_is_called_once_it_was_executed(late):
    name = late("value = 1\nvalue = 2\n")
    seen = []
    environment.when_imported(name, lambda: seen.append(sys.modules[name].value))
    for _ in range(2):  # whoever asks whether it is there
        assert importlib.util.find_spec(name).origin.endswith(f"{name}.py")
    assert name in [found.name for found in pkgutil.iter_modules()] and seen == []
    module = importlib.import_module(name)
    assert seen == [2]
    environment.when_imported(name, lambda: seen.append(3))
    assert seen == [2, 3]
    importlib.reload(module)
    del sys.modules[name]
    importlib.import_module(name)
    assert seen == [2, 3]


def test_a_module_that_is_waited_for_has_the_loader_that_it_has_otherwise(late, tmp_path):
    name, other = late("value = 1"), late("value = 1")
    (tmp_path / "words.txt").write_text("text beside it")
    environment.when_imported(name, lambda: None)
    module, plain = importlib.import_module(name), importlib.import_module(other)
    loader = module.__spec__.loader
    assert type(loader) is type(plain.__spec__.loader) and module.__loader__ is loader
    assert vars(loader).keys() == vars(plain.__spec__.loader).keys()
    assert loader.get_source(name) == "value = 1"
    assert pkgutil.get_data(name, "words.txt") == b"text beside it"
    assert module.__spec__ == importlib.machinery.PathFinder.find_spec(name)


def test_what_waits_stays_until_an_import_succeeds(late, tmp_path):
    name = late("raise ImportError('not today')")
    seen = []
    environment.when_imported(name, lambda: seen.append(sys.modules[name].value))
    with pytest.raises(ImportError, match="not today"):
        importlib.import_module(name)
    assert seen == []
    (tmp_path / f"{name}.py").write_text("value = 'mended, and longer than before'")
    importlib.import_module(name)
    assert seen == ["mended, and longer than before"]


def test_what_begins_to_wait_in_the_midst_of_an_import_is_called_with_a_later_one(late):
    """Nobody's loader can tell when it ends, so the next import looks."""
    text = """
import sys
from moe_ops import environment
seen, this = [], sys.modules[__name__]
environment.when_imported(__name__, lambda: seen.append(this.value))
assert seen == []
value = 1
"""
    module, other = importlib.import_module(late(text)), late("")
    importlib.import_module(other)
    assert module.seen == [1]


def test_modules_of_one_loader_are_told_apart(late, tmp_path, monkeypatch):
    """Of an archive all modules share one."""
    first, second = late("import SECOND\nvalue = 1"), late("value = 2")
    text = (tmp_path / f"{first}.py").read_text().replace("SECOND", second)
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as file:
        file.writestr(f"{first}.py", text)
        file.writestr(f"{second}.py", "value = 2")
    for name in (first, second):
        (tmp_path / f"{name}.py").unlink()
    monkeypatch.syspath_prepend(tmp_path / "both.zip")
    seen = []
    for name in (first, second):
        environment.when_imported(name, lambda name=name: seen.append(sys.modules[name].value))
    importlib.import_module(first)
    assert seen == [2, 1]


def test_threads_that_import_at_once_call_it_once(late):
    name = late("import time\ntime.sleep(0.05)\nvalue = 1")
    seen, start = [], threading.Barrier(8)

    def wait_and_import(number):
        start.wait()
        if number == 0:
            environment.when_imported(name, lambda: seen.append(sys.modules[name].value))
        importlib.import_module(name)
        importlib.util.find_spec(f"{name}_is_not_there")  # a later import

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(wait_and_import, range(8)))
    assert seen == [1]
