"""transformers' expert parallelism through moe_ops: `ep_implementation="moe_ops"`.

    from_pretrained(
        name,
        experts_implementation="moe_ops",
        distributed_config=DistributedConfig(tp_size=2, ep_size=2, ep_implementation="moe_ops"),
    )

transformers gives each rank its experts, as DTensors that it swaps for their local parts while
they run. Here are the tokens' way to them, what errors call a layer, and the saving of quantized
ones.

Dimensions: M tokens of this rank, H hidden size, top_k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed import mixin
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from moe_ops.integrations.transformers.families import HfModule
from moe_ops.integrations.transformers.hook import NAME
from moe_ops.integrations.transformers.quantizer import MoeOpsQuantizer
from moe_ops.parallel.collectives import Ranks, largest
from moe_ops.parallel.invariance import check
from moe_ops.tensors import sharding

_UNBOUNDED = 2**31 - 1
_NOT_INVARIANT = (
    "an experts_implementation of transformers rounds the sum of each rank to the tokens' dtype; "
    "use MoELayer with a process group",
)

# Of the modules of a model while transformers builds its layers' implementations.
_names: dict[Any, str] = {}


class ExpertParallel(EPImplementation):
    """The tokens of one MoE layer, to the experts of all ranks and back.

    Where all ranks of the expert-parallel group have the same tokens (`ep_size == tp_size`),
    nothing is sent before the experts run, and one all-reduce adds up the outputs: the call traces
    as one graph. Else each rank has tokens of its own: all are gathered on every rank, as many
    rows of each as the rank with the most tokens has, a number that is read on the host. Ranks of
    a tensor-parallel group that share their tokens divide them among themselves first.

    The experts run by whatever `experts_implementation` names. Gradients reach tokens, router
    weights and experts as in one process; those of experts are sums over all tokens.

    Raises:
        ValueError: in a call, if `moe_ops.set_batch_invariant` is on.
        RuntimeError: in a call, naming the layer, if another rank ended or did not call it within
            the timeout of the process group (gloo; NCCL ends the process).
    """

    def __init__(self, experts: HfModule, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        from moe_ops.parallel.dispatchers import AllGatherReduceScatter, AllReduce

        super().__init__(experts, ep_mesh, tp_mesh)
        self.first_expert = ep_mesh.get_local_rank() * self.num_local_experts
        group = ep_mesh.get_group()
        kind = AllReduce if self.shares_batch else AllGatherReduceScatter
        label = _names.get(experts) or f"an experts module ({type(experts).__name__})"
        self.dispatcher = kind(group.group_name, group.size(), _UNBOUNDED, label=label)
        self.ranks = Ranks(group.group_name, group.size(), False, None, label)

    def __call__(
        self,
        hidden_states: Tensor,  # (M, H)
        top_k_index: Tensor,  # (M, top_k), global ids
        top_k_weights: Tensor,  # (M, top_k)
    ) -> Tensor:  # (M, H)
        if self.shares_batch:
            return self._run(self.dispatcher, hidden_states, top_k_index, top_k_weights)
        tokens = [hidden_states, top_k_index, top_k_weights]
        if self.tp_mesh.size() > 1:
            tokens = [self._divided(t) for t in tokens]
        most = largest(self.ranks, tokens[0].shape[0], hidden_states.device)
        out = self._run(replace(self.dispatcher, max_num_tokens=max(most, 1)), *tokens)
        if self.tp_mesh.size() > 1:
            return self._joined(out, hidden_states.shape)
        # not the first rows of more: what is done in place to a view escapes FSDP's backward hooks
        return out.clone() if out.requires_grad else out

    def _run(self, dispatcher: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        check(None, _NOT_INVARIANT)
        rows, ids, weights = dispatcher.dispatch(x, ids, weights)
        local = ids - self.first_expert
        elsewhere = (local < 0) | (local >= self.num_local_experts)
        out = self.experts_forward(  # what all implementations skip: this id, with weight 0
            rows,
            local.masked_fill(elsewhere, self.num_local_experts),
            weights.masked_fill(elsewhere, 0),
        )
        return dispatcher.combine(out, x.shape[0])

    def _divided(self, rows: Tensor) -> Tensor:
        """This rank's part of rows that all ranks of its tensor-parallel group have."""
        whole = DTensor.from_local(rows, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _joined(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The opposite: the rows of all ranks of the tensor-parallel group."""
        part = DTensor.from_local(
            rows.contiguous(),
            self.tp_mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=(shape[1], 1),
        )
        return part.full_tensor()


def _named(original: Callable) -> Callable:
    """Let implementations know what the model calls their layers."""

    def apply_expert_parallelism(model: HfModule, *args: Any, **kwargs: Any) -> HfModule:
        _names.update({module: name for name, module in model.named_modules()})
        try:
            return original(model, *args, **kwargs)
        finally:
            _names.clear()

    return apply_expert_parallelism


def _gathering(original: Callable) -> Callable:
    """Let `save_pretrained` gather what is left of the state dict that our quantizer made, where
    transformers would make another of quantized tensors, which no file can hold.
    """

    def gather_sharded_state_dict_for_save(
        self: HfModule,
        model_to_save: HfModule,
        state_dict: dict[str, Any],
        distributed_config: Any,
        *,
        save_on_this_rank: bool = True,
    ) -> dict[str, Any]:
        if distributed_config is None or not _is_quantized(model_to_save):
            given = self, model_to_save, state_dict, distributed_config
            return original(*given, save_on_this_rank=save_on_this_rank)
        saved = {}
        for name, t in state_dict.items():  # all ranks gather, and one at a time
            whole = sharding.gathered(t) if sharding.is_sharded(t) else t
            if save_on_this_rank:
                saved[name] = whole.detach().cpu()
        return saved

    return gather_sharded_state_dict_for_save


def _refusing(original: Callable) -> Callable:
    def save_distributed_checkpoint(
        self: HfModule, model_to_save: HfModule, *args: Any, **kwargs: Any
    ) -> None:
        if _is_quantized(model_to_save):
            raise ValueError(
                "distributed_checkpoint must be False for quantized experts, got True; without it "
                "save_pretrained writes one checkpoint that loads on any number of ranks"
            )
        original(self, model_to_save, *args, **kwargs)

    return save_distributed_checkpoint


def _is_quantized(model: HfModule) -> bool:
    return isinstance(getattr(model, "hf_quantizer", None), MoeOpsQuantizer)


_METHODS = {
    "gather_sharded_state_dict_for_save": _gathering,
    "save_distributed_checkpoint": _refusing,
}


def register() -> None:
    """Offer "moe_ops" as an `ep_implementation`. Where transformers has moved one of the functions
    that are wrapped for it, nothing is, and transformers refuses the name.
    """
    owner = getattr(mixin, "DistributedMixin", None)
    if not hasattr(mixin, "apply_expert_parallelism"):
        return
    if not all([hasattr(owner, name) for name in _METHODS]):
        return
    mixin.apply_expert_parallelism = _named(mixin.apply_expert_parallelism)
    for name, wrapped in _METHODS.items():
        setattr(owner, name, wrapped(getattr(owner, name)))
    EPImplementationInterface.register(NAME, ExpertParallel)
