"""transformers' expert parallelism over processes that talk through gloo equals one process."""

import importlib.util
import json
import multiprocessing
import time
from types import SimpleNamespace

import pytest
import torch.multiprocessing

pytest.importorskip("transformers")
if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
    pytest.skip("transformers 5.23 brought expert parallelism", allow_module_level=True)

import moe_ops
from moe_ops.integrations.transformers.expert_parallel import ExpertParallel
from moe_ops.integrations.transformers.layers import layer_of
from tests.integrations.transformers import expert_ranks

SECONDS = 300.0  # after which a job hangs: alone it takes a fifth of that, on a busy machine more


@pytest.mark.slow
@pytest.mark.parametrize(("size", "counts"), [(2, (49, 47)), (4, (9, 9, 9, 9))])
def test_ranks_agree_with_a_single_process(size, counts, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    multiprocessing.set_forkserver_preload([expert_ranks.__name__])
    start = time.monotonic()
    job = torch.multiprocessing.start_processes(
        expert_ranks.run,
        (size, str(tmp_path), SECONDS),
        nprocs=size,
        join=False,
        start_method="forkserver",
    )
    try:
        while not job.join(timeout=1.0):
            assert time.monotonic() - start < SECONDS, "the job hangs"
    finally:
        for process in job.processes:
            if process.is_alive():
                process.kill()
    for rank, count in enumerate(counts):
        lines = (tmp_path / f"{rank}.json").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert not (wrong := [name for name, holds in found if not holds]), (rank, wrong)
        assert len(found) == count


def test_sums_of_ranks_that_are_rounded_are_refused():
    with moe_ops.set_batch_invariant(True), pytest.raises(ValueError, match="rounds the sum of"):
        ExpertParallel._run(None, None, None, None, None)


def test_fsdp_takes_no_transposed_experts():
    class Experts(torch.nn.Module):
        is_transposed = has_gate = True

        def _get_fsdp_state(self):  # as fully_shard adds
            return SimpleNamespace(_is_root=None)

    layer = layer_of("model.layers.0.mlp.experts", Experts())
    assert layer is not None
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts.down_proj must not be quant"):
        layer.set_weight("down_proj", moe_ops.quantize(torch.randn(2, 32, 64), "int4_w4a16:g32"))
