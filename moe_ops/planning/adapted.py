"""Calls whose tokens have adapters: the backend that runs them, and their op."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moe_ops import backends
from moe_ops.ops.args import TokenAdapters
from moe_ops.ops.backend import Adapts, Backend
from moe_ops.ops.call import ExpertsCall
from moe_ops.ops.options import encode, text_of_tiers
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import bind
from moe_ops.planning import plan as plans
from moe_ops.planning.auto import ADAPTED


def run(call: ExpertsCall, adapters: TokenAdapters, backend: str) -> Tensor:
    """The result of a call. Workspaces have room for all rows: such calls do not run in chunks.

    Raises:
        ValueError: the named backend does not take adapters of tokens, or this call.
    """
    plan, adapts = _plan(call, backend)
    M, device, problem = call.num_tokens, call.hidden_states.device, plan.problem
    tiers = text_of_tiers(((-1, plan.backend),))
    options = problem.options._replace(tiers_text=tiers, max_workspace_bytes=None)
    text = encode(problem.scheme, problem.layout, options)
    space = (adapts.elements(M, problem, adapters.ranks),), torch.float32
    shapes = (call.output(), *plan.workspace_shapes(M), space)
    buffers = [torch.empty(*size, dtype=t, device=device) for size, t in shapes]
    *values, text = call.op_values(text)
    ADAPTED.op(*buffers, *values, *adapters, text)
    return buffers[0]


def _plan(call: ExpertsCall, backend: str) -> tuple[plans.Plan, Adapts]:
    """The plan of one tier for all rows at once, of the named backend or of the first that takes
    the call.
    """
    unbounded = call._replace(options=call.options._replace(max_workspace_bytes=None))
    takers = [one for one in backends.BACKENDS if one.takes.adapts is not None]
    if backend == "auto":
        every = bind.look_up(unbounded, backend).plan
        problem, machine = every.problem.replace(chunk_rows=0), every.machine
        takers = [one for one in takers if not _why_not(one, problem, machine)]
    else:
        takers = [one for one in takers if one.name == backend]
    if not takers:
        names = ", ".join([one.name for one in backends.BACKENDS if one.takes.adapts is not None])
        raise ValueError(
            f"backend must be 'auto' or one of {names} for tokens with adapters of their own, got "
            f"{backend!r}; merge an adapter into the weights to run it there"
        )
    taker = takers[0]
    plan = bind.look_up(unbounded, taker.name).plan
    adapts = taker.takes.adapts
    assert adapts is not None
    reasons = adapts.supports(plan.problem, plan.machine)
    if reasons:
        raise ValueError(f"backend {backend!r} cannot run this call: {'; '.join(reasons)}")
    return dataclasses.replace(plan, problem=plan.problem.replace(chunk_rows=0)), adapts


def _why_not(backend: Backend, problem: Problem, machine: Machine) -> list[str]:
    adapts = backend.takes.adapts
    assert adapts is not None
    return plans.why_not(backend, problem, machine) or adapts.supports(problem, machine)
