"""Expert weights that are not quantized, in a layout that a backend asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.tensors import layouts
from moe_ops.tensors.base import ExpertTensor


class PlainExpertTensor(ExpertTensor):
    """Plain weights whose rows or columns lie in another order than their shape says: what ``prepare`` makes of a
    tensor. qdata is (E, N, K) in the weights' own dtype; there is no scale, and the scheme is "".
    """

    tensor_data_names = ["qdata"]
    optional_tensor_data_names = []

    def __new__(
        cls,
        qdata: Tensor,
        scheme: str = "",
        weight_layout: str = "",
        dtype: torch.dtype = torch.bfloat16,
        requires_grad: bool = False,
    ):
        return super().__new__(
            cls, qdata, None, scheme, weight_layout, dtype, requires_grad=requires_grad
        )

    def __init__(
        self,
        qdata: Tensor,
        scheme: str = "",
        weight_layout: str = "",
        dtype: torch.dtype = torch.bfloat16,
        requires_grad: bool = False,
    ):
        super().__init__(qdata, None, scheme, weight_layout, dtype, requires_grad=requires_grad)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as a plain tensor in their natural order."""
        return layouts.natural(self).to(self.dtype if dtype is None else dtype)
