"""`python -m moe_ops.serve`: transformers' server around experts on moe_ops."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.request
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("fastapi", reason="needs transformers[serving]")
pytest.importorskip("uvicorn", reason="needs transformers[serving]")

from transformers.cli.serving import model_manager, utils

import moe_ops.integrations.transformers as moe_transformers
from moe_ops.integrations.transformers import serving
from tests.support.paths import ROOT

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "eos_token_id": None,
    "pad_token_id": 256,
    "bos_token_id": None,
    "max_position_embeddings": 512,
}
PROMPTS = ("hello world", "a", "experts of a mixture")


def save_tokenizer(folder, letters=""):
    """Bytes, or letters, and turns as Qwen marks them, which the server parses answers by."""
    tokenizers = pytest.importorskip("tokenizers")
    bytes_of = letters or sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*bytes_of, "<pad>"])}
    bpe = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<pad>")
    model = tokenizers.Tokenizer(bpe)
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("qwen3_moe"))
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=2
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def options(folder: str, *more: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    few = ["--cb-num-blocks", "16", "--cb-max-batch-tokens", "128", "--dtype", "float32"]
    return [folder, "--port", str(port), "--device", "cpu", "--non-blocking", *few, *more]


def answer(port: int, folder: str, prompt: str, stream: bool = False) -> str:
    body = {"model": folder, "messages": [{"role": "user", "content": prompt}]}
    body |= {"max_tokens": 8, "stream": stream}
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read().decode()
    if not stream:
        return json.loads(text)["choices"][0]["message"]["content"]
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") for part in parts for choice in part["choices"]]
    return "".join([delta or "" for delta in deltas])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "int8_w8a16:g32"])
@pytest.mark.parametrize("batching", [True, False])
def test_answers_are_those_of_generate(folder, scheme, batching, capfd):
    """Greedily, of several clients at once, streamed or not."""
    quantized = ["--scheme", scheme] if scheme else []
    given, rest = serving.parse(
        options(folder, *quantized, *([] if batching else ["--no-continuous-batching"]))
    )
    server = serving.launch(given, rest)
    try:
        while not server.server.started:
            assert server._thread.is_alive()
        port = server.server.config.port
        found: dict[tuple[str, bool], str] = {}

        def ask(prompt: str, stream: bool) -> None:
            found[prompt, stream] = answer(port, folder, prompt, stream)

        calls = [(prompt, stream) for prompt in PROMPTS for stream in (False, True)]
        threads = [threading.Thread(target=ask, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.kill_server()
    said = capfd.readouterr().out
    assert "fused_experts, silu" in said and "route_tokens" in said and "M = 128" in said

    config = serving.MoeOpsConfig(scheme) if scheme else None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        want = tokenizer.decode(out, skip_special_tokens=True)
        assert found[prompt, False] == want
        # a stream holds bytes back until they are a character
        assert found[prompt, True].rstrip("\ufffd") == want.rstrip("\ufffd")


@pytest.mark.slow
def test_a_model_that_is_not_batched_is_refused_at_the_start(tmp_path):
    """transformers answers its requests with nothing, and reports success."""
    torch.manual_seed(0)
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        **ranks,
        **groups,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(RuntimeError, match="not serve DeepseekV3.*Give --no-continuous-batching"):
        serving.launch(*serving.parse(options(str(tmp_path), "--no-warmup")))


@pytest.mark.slow
def test_experts_in_host_memory_without_a_device(folder):
    """transformers' server says "auto" where nobody names a device."""
    words = options(folder, "--no-continuous-batching", "--gpu-memory", "1GiB")
    at = words.index("--device")
    server = serving.launch(*serving.parse(words[:at] + words[at + 2 :]))
    try:
        while not server.server.started:
            assert server._thread.is_alive()
        assert answer(server.server.config.port, folder, PROMPTS[0])
    finally:
        server.kill_server()


@pytest.mark.slow
def test_a_file_whose_tokenizer_cannot_be_read_asks_for_one():
    name = str(ROOT / "tests/fixtures/gguf/qwen3moe-Q4_0:model.gguf")  # which has none
    with pytest.raises(RuntimeError, match="the tokenizer in .* cannot be read .* by --tokenizer"):
        serving.launch(*serving.parse(options(name, "--no-warmup")))


@pytest.mark.slow
def test_a_server_that_cannot_start_ends(folder):
    """Its thread of batches as well, which would keep the process for ever."""
    before = model_manager.ModelManager, utils.GenerationState
    threads = {*threading.enumerate()}
    with socket.create_server(("localhost", 0)) as taken:
        of = [folder, "--no-warmup", "--device", "cpu", "--cb-num-blocks", "16"]
        given, rest = serving.parse([*of, "--port", str(taken.getsockname()[1])])
        with pytest.raises(SystemExit):
            serving.launch(given, rest)
    assert all([thread.daemon for thread in {*threading.enumerate()} - threads])
    assert before == (model_manager.ModelManager, utils.GenerationState)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gguf/qwen3moe-Q4_0:model.gguf", "gguf_models:glm4moe.gguf"])
def test_gguf_files_are_served(monkeypatch, name):
    """transformers' server finds no class in the fields of the first, and does not know the
    second's architecture.
    """
    pytest.importorskip("gguf")
    manager = model_manager.ModelManager
    monkeypatch.setattr(manager, "_load_processor", lambda *_, **__: None)  # files without one
    few = ["--no-continuous-batching", "--no-warmup"]
    name = str(ROOT / "tests/fixtures" / name)
    server = serving.launch(*serving.parse(options(name, *few)))
    try:
        ((key, loaded),) = server._model_manager.loaded_models.items()
        assert key == name
        folder, file = name.split(":")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            quantization_config=serving.MoeOpsConfig(),
            dtype=torch.float32,
        )
        ids = torch.arange(5)[None]
        with torch.no_grad():
            torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    finally:
        while not server.server.started:
            assert server._thread.is_alive()
        server.kill_server()


@pytest.mark.slow
@pytest.mark.parametrize("batching", [True, False])
def test_a_gguf_file_answers_by_a_tokenizer_of_its_own(batching, tmp_path):
    tokenizer = save_tokenizer(tmp_path, letters="abcdefghijklmnopqrstuvwxyz")
    folder, name = ROOT / "tests/fixtures/gguf_models", "olmoe.gguf"
    more = ["--tokenizer", str(tmp_path), "--no-warmup"]
    more += [] if batching else ["--no-continuous-batching"]
    given, rest = serving.parse(options(f"{folder}:{name}", *more))
    server = serving.launch(given, rest)
    try:
        while not server.server.started:
            assert server._thread.is_alive()
        found = answer(server.server.config.port, given.model, "hello")
    finally:
        server.kill_server()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=moe_transformers.MoeOpsConfig(),
        dtype=torch.float32,
    )
    turns = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=8)[0, ids.input_ids.shape[1] :]
    assert found and found == tokenizer.decode(out, skip_special_tokens=True)


def test_experts_that_are_quantized_stay_so(folder, tmp_path):
    """transformers' own loaders leave some of them random, and want libraries for others."""

    def config(model: str, *more: str) -> serving.MoeOpsConfig | None:
        return serving.loading_config(serving.parse([model, *more])[0])

    assert config(folder) is None
    assert config(folder, "--scheme", "nf4").scheme == "nf4_w4a16:g64"
    assert config(folder, "--gpu-memory", "1GiB").gpu_memory == 2**30
    assert config("org/model:Q4_K_M.gguf", "--backend", "torch").backend == "torch"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    moe_transformers.quantize(model, "nf4")
    moe_transformers.save_bitsandbytes(model, tmp_path)
    assert config(str(tmp_path)).scheme is None
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config(str(tmp_path))
    )
    experts = [m.model.layers[0].mlp.experts.down_proj for m in (model, again)]
    assert torch.equal(experts[0].dequantize(), experts[1].dequantize())


def test_a_request_that_is_lost_is_not_waited_for():
    """Where the thread of batches fails while it comes."""
    status = SimpleNamespace(fatal_error=None)

    def get_result(name, timeout):
        status.fatal_error = ValueError("no such attention")  # the thread is not alive by then

    batches = SimpleNamespace(
        add_request=lambda *_, **__: None,
        get_result=get_result,
        is_running=lambda: status.fatal_error is None,
        background_thread_status=status,
    )
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, num_experts=8))
    with pytest.raises(RuntimeError, match="no such attention. Give --no-continuous-batching"):
        serving.try_batching(batches, model)


def test_sizes_that_come_are_warmed_up():
    powers = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert serving.token_counts(None, True) == powers
    assert serving.token_counts(100, False) == [*powers[:7], 100]
    assert serving.token_counts(320, True) == [*powers[:8], 192, 256, 320]
    assert serving.token_counts(2048, True)[-3:] == [1920, 1984, 2048]


def test_batches_sample_alike_and_other_requests_as_the_model_says():
    config = transformers.GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9)
    before = config.to_dict()
    found = serving.sampling(config, serving.parse(["m"])[0])
    said = (found.do_sample, found.temperature, found.top_k, found.top_p)
    assert said == (False, None, None, None)
    found = serving.sampling(config, serving.parse(["m", "--temperature", "2", "--top-k", "3"])[0])
    said = (found.do_sample, found.temperature, found.top_k, found.top_p)
    assert said == (True, 2.0, 3, None)
    assert config.to_dict() == before


def test_options_of_the_server_are_passed_on(monkeypatch):
    given, rest = serving.parse(["m", "--port", "1", "--scheme", "int4_w4a16", "--enable-cors"])
    assert given.scheme == "int4_w4a16" and rest == ["--port", "1", "--enable-cors"]
    given.cb_max_batch_tokens = 77
    for cuda, graphs in ((False, []), (True, ["--cb-use-cuda-graph"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        batched = ["--continuous-batching", "--cb-max-batch-tokens", "77", *graphs]
        assert serving.server_options(given, rest) == [*rest, *batched, "--", "m"]
    given.no_cuda_graphs = True
    assert serving.server_options(given, rest)[-3] == "--no-cb-use-cuda-graph"
    assert serving.server_options(given, ["--cb-use-cuda-graph"])[:-2] == [
        "--cb-use-cuda-graph",
        *batched[:3],
    ]
    given.no_continuous_batching = True
    assert serving.server_options(given, rest) == [*rest, "--", "m"]
    given, rest = serving.parse(["--no-continuous-batching", "--", "--m"])  # a folder's name
    assert serving.server_options(given, rest) == ["--", "--m"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert serving.parse(["m"])[0].cb_max_batch_tokens == 2048


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["m", "--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (["m", "--temperature", "nan"], "--temperature must be at least 0, got nan"),
        (["m", "--top-p", "0.9"], "--top-p needs a --temperature above 0"),
        (
            ["m", "--temperature", "1", "--no-continuous-batching"],
            "--temperature is of batched requests",
        ),
        (["m", "--quantization", "x"], "--quantization is not taken here: --scheme"),
        (["m", "--quantization=x"], "--quantization is not taken here: --scheme"),
        (["--port", "1", "m"], "the model must come before --port, got '1' after it"),
        (["FILE.gguf"], "the model of a GGUF file is FOLDER:FILE, here .:FILE.gguf"),
        (["m", "--scheme", "int3"], "scheme must be one of moe_ops.schemes.SCHEMES, got 'int3'"),
        (["m", "--gpu-memory", "12 apples"], "gpu_memory must be"),
        (["m", "--backend", "cublas"], "invalid choice: 'cublas'"),
        (["./m"], "the model must be a folder that exists, or a name on the Hub, got './m'"),
        (["m", "--tokenizer", "/a/b"], "--tokenizer must be a folder that exists, or a name on"),
        ([".:Q4.gguf"], ". has FILE.gguf, and the model names its 'Q4.gguf'"),
        ([".:FILE.bin"], ". has FILE.gguf, and the model names its 'FILE.bin'"),
        ([".:FILE.gguf"], "FILE.gguf must be a GGUF file, got 0 bytes"),
    ],
)
def test_errors(argv, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.gguf").touch()
    with pytest.raises(SystemExit):
        serving.parse(argv)
    assert sentence in capsys.readouterr().err


def test_a_folder_may_have_a_colon_in_its_name(tmp_path):
    folder = tmp_path / "run:3"
    folder.mkdir()
    assert serving.parse([str(folder)])[0].model == str(folder)


@pytest.mark.parametrize("wrong", [["--portt", "1"], ["--port", "one"]])
def test_options_that_the_server_refuses(wrong, capsys):
    """Nothing is loaded before they are."""
    with pytest.raises(SystemExit) as found:
        serving.launch(*serving.parse(["m", *wrong, "--no-warmup"]))
    assert found.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m moe_ops.serve: error: ") and wrong[0] in said


@pytest.mark.slow
def test_command():
    command = [sys.executable, "-W", "ignore", "-m", "moe_ops.serve", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and "--scheme" in found.stdout
