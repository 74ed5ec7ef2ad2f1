"""How many files a reader of one warm call has to open."""

import pytest
import torch

from moe_ops.kernels import launch
from tools import files_of_a_call

# No more than these: a call that runs through a file more should rather run through one less.
MOST = {"inference": 23, "training": 30}


@pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", MOST)
def test_a_call_runs_through_few_files(name):
    torch.manual_seed(0)
    files = files_of_a_call.files_of(files_of_a_call.CALLS[name]())
    assert {"experts.py", "kernels/launch.py", "ops/call.py"} <= set(files)
    assert not [file for file in files if file.startswith("kernels/device")]  # runs on the GPU
    assert len(files) <= MOST[name], files


@pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")
def test_what_follows_the_last_launch_does_not_count():
    call = files_of_a_call.inference()

    def more() -> None:
        call()
        launch.gpu.__wrapped__(-1)

    assert files_of_a_call.files_of(more) == files_of_a_call.files_of(call)
    assert files_of_a_call.files_of(lambda: None) == []
