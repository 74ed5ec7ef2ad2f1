"""Where tests of kernels run: on a CPU, by interpreters and stand-ins, or on a GPU (`-m gpu`)."""

from __future__ import annotations

import pytest
import torch

CUDA = torch.cuda.is_available()
INTERPRETED = pytest.mark.skipif(CUDA, reason="with a GPU the kernels are compiled")
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)]
devices = pytest.mark.parametrize("device", DEVICES)
# (device, dtype)
everywhere = pytest.mark.parametrize(
    "where",
    [
        pytest.param(("cpu", torch.float32), id="interpreted-fp32", marks=INTERPRETED),
        pytest.param(("cuda", torch.float32), id="cuda-fp32", marks=ON_GPU),
        pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=ON_GPU),
        pytest.param(("cuda", torch.float16), id="cuda-fp16", marks=ON_GPU),
    ],
)
