"""`python -m moe_ops.serve`: transformers' own server over a model whose experts run on moe_ops.

The server is `transformers serve`, which has no flag for experts: what it constructs while it
starts, a manager of models and a state of generations, is replaced by classes of the same that
also attach, quantize and warm up the model, and start continuous batching before the first
request, which would decide for all others how tokens are sampled.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file
from transformers.utils.import_utils import is_serve_available

from moe_ops.backends import BACKENDS
from moe_ops.integrations.checkpoints.experts import Checkpoint
from moe_ops.integrations.checkpoints.files import quantization_config
from moe_ops.integrations.transformers.attach import attach
from moe_ops.integrations.transformers.config import MoeOpsConfig
from moe_ops.integrations.transformers.routers import fuse_routers
from moe_ops.warmup import warmup

_PATIENCE = 1800.0  # seconds until a first request, which captures graphs, counts as lost
_BATCH_TOKENS = 2048  # of a step, prompts and decodes together, where nobody says another
_MOST_REQUESTS = 256  # that decode together, whose powers of two are warmed up
_PADDING = 64  # transformers' q_padding_interval_size, for which its server has no flag
_SAMPLING = ("temperature", "top_p", "top_k")


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """(options of this launcher, those of `transformers serve`)."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_ops.serve",
        description="Serve a mixture-of-experts model with transformers' OpenAI-compatible "
        "server, its experts on moe_ops.",
        epilog="All other options are those of `transformers serve`, e.g. --port 8000, "
        "--attn-implementation flash_attention_2.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="folder, or name on the Hub; of a GGUF file FOLDER:FILE")
    add("--scheme", help="quantize the experts, e.g. int4_w4a16")
    add(
        "--backend",
        default="auto",
        choices=["auto", *(b.name for b in BACKENDS)],
        help="of all expert calls",
    )
    add("--gpu-memory", help='experts in host memory, e.g. "12GiB" or "auto" (docs/residency.md)')
    add("--tokenizer", help="folder or name; by default that of the model or of the GGUF file")
    add("--no-fused-routers", action="store_true", help="leave routers to transformers")
    add("--no-continuous-batching", action="store_true", help="one request after the other")
    add("--no-cuda-graphs", action="store_true", help="run each step eagerly")
    add("--cb-max-batch-tokens", type=int, metavar="N", help="in one step; on a GPU 2048")
    add("--no-warmup", action="store_true", help="compile when requests come")
    of_all = "of all requests that are batched"
    add("--temperature", type=float, default=0.0, help=f"{of_all}; 0, the default, is greedy")
    add("--top-p", type=float, help=of_all)
    add("--top-k", type=int, help=of_all)
    words = list(sys.argv[1:] if argv is None else argv)
    given, rest = parser.parse_known_args(words)
    before = words[: words.index(given.model)][-1:]
    if before and before[0] != "--" and before[0] in rest:
        # whether it takes a value only transformers knows
        parser.error(f"the model must come before {before[0]}, got {given.model!r} after it")
    if not given.temperature >= 0:
        parser.error(f"--temperature must be at least 0, got {given.temperature}")
    for name, value in (("--top-p", given.top_p), ("--top-k", given.top_k)):
        if value is not None and given.temperature == 0:
            parser.error(f"{name} needs a --temperature above 0: without, decoding is greedy")
    if given.no_continuous_batching and given.temperature:
        parser.error("--temperature is of batched requests: without batching, each has its own")
    try:  # before anything is downloaded
        MoeOpsConfig(given.scheme, given.backend, gpu_memory=given.gpu_memory)
    except ValueError as error:
        parser.error(str(error))
    if given.cb_max_batch_tokens is None and torch.cuda.is_available():
        given.cb_max_batch_tokens = _BATCH_TOKENS
    for name, ours in (("--quantization", "--scheme"), ("--continuous-batching", "it is on")):
        if name in [option.partition("=")[0] for option in rest]:
            parser.error(f"{name} is not taken here: {ours}")
    if given.model.endswith(".gguf") and os.path.isfile(given.model):
        folder, file = os.path.split(given.model)
        parser.error(f"the model of a GGUF file is FOLDER:FILE, here {folder or '.'}:{file}")
    if wrong := wrong_name(given.model, given.tokenizer):
        parser.error(wrong)
    return given, rest


def wrong_name(model: str, tokenizer: str | None) -> str:
    """What is wrong with names of folders and GGUF files of this machine; "" if nothing is, as of
    names on the Hub, which nobody knows before they are asked for.
    """
    folder, _, file = (model, "", "") if os.path.isdir(model) else model.partition(":")
    for what, name in (("the model", folder), ("--tokenizer", tokenizer)):
        # "organization/name" has no more than one slash
        here = name is not None and (name[:1] in "/.~" or name.count("/") > 1)
        if name is not None and here and not os.path.isdir(name):
            return f"{what} must be a folder that exists, or a name on the Hub, got {name!r}"
    if not file or not os.path.isdir(folder):
        return ""
    if not file.endswith(".gguf") or not os.path.isfile(os.path.join(folder, file)):
        found = ", ".join(sorted([path.name for path in Path(folder).glob("*.gguf")]))
        return f"{folder} has {found or 'no .gguf file'}, and the model names its {file!r}"
    try:
        Checkpoint(os.path.join(folder, file))  # reads the header alone
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def server_options(given: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The arguments of `transformers serve`."""
    options = list(rest)
    if not given.no_continuous_batching:
        options.append("--continuous-batching")
        if given.cb_max_batch_tokens is not None:
            options += ["--cb-max-batch-tokens", str(given.cb_max_batch_tokens)]
        said = any("cb-use-cuda-graph" in option for option in rest)
        if torch.cuda.is_available() and not said:
            graphs = "no-" if given.no_cuda_graphs else ""
            options.append(f"--{graphs}cb-use-cuda-graph")
    return [*options, "--", given.model]  # whose name may begin as an option does


def loading_config(given: argparse.Namespace) -> MoeOpsConfig | None:
    """The quantization_config of `from_pretrained`; None for a plain checkpoint that stays plain.

    Experts that somebody quantized are read by moe_ops and stay packed. transformers would want
    the library that quantized them, decode them, or leave them random.
    """
    name = given.model
    if given.scheme is None and given.gpu_memory is None and not name.endswith(".gguf"):
        revision = None
        if not os.path.exists(name):  # of the Hub: "org/model@revision"
            name, _, revision = name.partition("@")
        file = cached_file(name, "config.json", revision=revision or None)
        if not quantization_config(Path(file).parent)[0]:
            return None
    return MoeOpsConfig(given.scheme, given.backend, gpu_memory=given.gpu_memory)


def token_counts(most: int | None, padded: bool) -> list[int]:
    """Numbers of tokens that steps will have: powers of two that decode together, and the largest
    batch, where one is known. Those in between are many, but under CUDA graphs all are padded to
    the same multiples.
    """
    counts = {1 << i for i in range(_MOST_REQUESTS.bit_length())}
    if most is None:
        return sorted(counts)
    if padded:
        counts |= {*range(_PADDING, most, _PADDING)}
    return [*sorted([n for n in counts if n < most]), most]


def prepare(model: Any, given: argparse.Namespace) -> None:
    """Attach a loaded model, and warm it up for decoding and for the largest batch."""
    print(attach(model, given.backend), flush=True)
    if not given.no_fused_routers:
        print(fuse_routers(model), flush=True)
    if not given.no_warmup:
        padded = torch.cuda.is_available() and not given.no_cuda_graphs
        print(warmup(model, token_counts(given.cb_max_batch_tokens, padded)), flush=True)


def sampling(config: Any, given: argparse.Namespace) -> Any:
    """A model's generation_config for batches, whose requests are all sampled alike."""
    config = copy.deepcopy(config)
    config.do_sample = given.temperature > 0
    for name in _SAMPLING:
        value = getattr(given, name)
        # what does not count where nothing is sampled would only be warned of
        setattr(config, name, value if config.do_sample and value is not None else None)
    return config


def try_batching(batches: Any, model: Any) -> None:
    """Generate two tokens by continuous batching.

    Raises:
        RuntimeError: it does not serve this model. Nothing but a field of results says that.
    """
    first = next(i for i in (model.config.get_text_config().bos_token_id, 0) if i is not None)
    name = batches.add_request([first], max_new_tokens=2)
    end = time.monotonic() + _PATIENCE
    # a request that comes while the thread fails may be lost, and has no result then
    while (result := batches.get_result(name, timeout=1.0)) is None:
        if not batches.is_running() or time.monotonic() > end:
            break
    error = batches.background_thread_status.fatal_error
    reason = error if result is None else result.error
    if result is None or reason:
        raise RuntimeError(
            f"continuous batching of transformers does not serve {type(model).__name__}: "
            f"{str(reason or 'it did not answer').rstrip('.')}. Give --no-continuous-batching"
        )


def launch(given: argparse.Namespace, rest: Sequence[str]) -> Any:
    """Start the server; returns its `Serve` when it ends, with --non-blocking at once.

    Raises:
        ImportError: its libraries are missing.
        RuntimeError: continuous batching does not serve the model.
        SystemExit: an option is none of `transformers serve`, or has a value that it refuses.
    """
    if not is_serve_available():
        raise ImportError(
            "moe_ops.serve needs the libraries of transformers' server; install them with: "
            'pip install "transformers[serving]"'
        )
    import typer
    from transformers.cli import serve
    from transformers.cli.serving import model_manager, utils

    managers: list[Any] = []
    states: list[Any] = []

    class Manager(model_manager.ModelManager):
        """Loads models for moe_ops."""

        device: Any  # where models go; None: where gpu_memory says

        def __init__(self, *args: Any, **kwargs: Any):
            managers.append(self)
            super().__init__(*args, **kwargs)

        def get_quantization_config(self) -> Any:
            return loading_config(given)

        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            if given.tokenizer is None:
                try:
                    return super()._load_processor(*args, **kwargs)
                except Exception as error:
                    if not given.model.endswith(".gguf"):
                        raise
                    raise RuntimeError(
                        f"the tokenizer in {given.model} cannot be read ({error}); give the "
                        "original model's by --tokenizer FOLDER"
                    ) from error
            trusted = self.trust_remote_code
            return AutoTokenizer.from_pretrained(given.tokenizer, trust_remote_code=trusted)

        def _load_model(
            self, name: str, *args: Any, gguf_file: str | None = None, **kwargs: Any
        ) -> Any:
            if given.gpu_memory is not None and self.device == "auto":  # nobody named one
                self.device = None
            if gguf_file is None:
                model = super()._load_model(name, *args, **kwargs)
            else:  # whose fields transformers reads for fewer architectures, often without a class
                folder, revision = utils.split_revision(name)
                model = AutoModelForCausalLM.from_pretrained(
                    folder,
                    revision=revision,
                    gguf_file=gguf_file,
                    quantization_config=self.get_quantization_config(),
                    attn_implementation=self.attn_implementation,
                    dtype=self.dtype,
                    device_map=self.device,
                )
            prepare(model, given)
            return model

    class State(utils.GenerationState):
        """Starts continuous batching with the model that was loaded first."""

        def __init__(self, *args: Any, **kwargs: Any):
            states.append(self)
            super().__init__(*args, **kwargs)
            for name, loaded in managers[0].loaded_models.items():
                modality = managers[0].get_model_modality(loaded.model, loaded.processor)
                if self.use_continuous_batching(loaded.model, modality):
                    batching = self.get_manager(name, use_cb=True)
                    config = sampling(loaded.model.generation_config, given)
                    batching.init_cb(loaded.model, config)
                    try_batching(batching._cb, loaded.model)

    before = model_manager.ModelManager, utils.GenerationState
    model_manager.ModelManager, utils.GenerationState = Manager, State
    runs = None
    try:
        app = typer.Typer(add_completion=False)
        app.command()(serve.Serve)
        runs = app(server_options(given, rest), standalone_mode=False)
        return runs
    except Exception as error:
        if not hasattr(error, "format_message"):  # as typer's own have, of the command line
            raise
        print(f"python -m moe_ops.serve: error: {error.format_message()}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        model_manager.ModelManager, utils.GenerationState = before
        if not hasattr(runs, "_thread"):  # it ended, and its thread of batches would not
            for state in states:
                state.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    launch(*parse(argv))
