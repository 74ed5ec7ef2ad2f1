"""Expert parallelism over processes that talk through gloo equals one process with all experts."""

import json
import multiprocessing
import time

import pytest
import torch.multiprocessing

from tests.parallel import ranks

SECONDS = 300.0  # after which a job hangs: alone it takes a fifth of that, on a busy machine more
GPU_SECONDS = 600.0  # with kernels that are compiled first


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """The ranks run what a machine without a GPU runs, not Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.slow
def test_two_ranks_agree_with_a_single_process(tmp_path):
    """With few of the schemes, and what they do when one ends."""
    run(2, tmp_path, SECONDS, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])  # 2 compile
def test_ranks_agree_with_a_single_process(size, tmp_path):
    run(size, tmp_path, SECONDS)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_gpus_agree_with_one(size, tmp_path):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    run(size, tmp_path, GPU_SECONDS, gpus=True)


def run(size, folder, seconds, gpus=False, quick=False):
    """Run all cases in as many processes, and compare what they found."""
    # All processes of the jobs come from one that has imported everything. With GPUs they cannot:
    # CUDA does not survive a fork, and what is imported may look for devices.
    multiprocessing.set_forkserver_preload([ranks.__name__])
    start = time.monotonic()
    job = torch.multiprocessing.start_processes(
        ranks.run_all,
        (size, str(folder), seconds, gpus, quick),
        nprocs=size,
        join=False,
        start_method="spawn" if gpus else "forkserver",
    )
    try:
        while not job.join(timeout=1.0):
            assert time.monotonic() - start < seconds, "the job hangs"
    finally:
        for process in job.processes:
            if process.is_alive():
                process.kill()
    for rank in range(size):
        compared = json.loads((folder / f"{rank}.json").read_text())
        assert len(compared) >= 100
        wrong = [
            f"{name}: {error:.3g}, above {most:.3g}"
            for name, error, most in compared
            if not error <= most  # NaN is wrong, too
        ]
        assert not wrong, f"rank {rank} of {size}:\n" + "\n".join(wrong)
