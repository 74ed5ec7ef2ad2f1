"""Graphs that were captured keep the gradients of the experts; torch.func is refused."""

import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops.ops import library

M, E, TOP_K, K, I = 6, 4, 2, 32, 16


class Experts(nn.Module):
    def __init__(self, backend: str = "auto"):
        super().__init__()
        self.router = nn.Linear(K, E, bias=False)
        self.w13 = nn.Parameter(torch.randn(E, 2 * I, K) / K**0.5)
        self.w2 = nn.Parameter(torch.randn(E, K, I) / I**0.5)
        self.backend = backend

    def forward(self, x):
        weights, ids = moe_ops.route(self.router(x), TOP_K)
        return moe_ops.fused_experts(x, self.w13, self.w2, weights, ids, backend=self.backend)


def reference(module: Experts, x: torch.Tensor) -> torch.Tensor:
    """The layer in fp64 torch operators; every expert runs every token."""
    router, w13, w2 = (p.double() for p in (module.router.weight, module.w13, module.w2))
    weights, ids = (x @ router.T).softmax(-1).topk(TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("mk,enk->emn", x, w13).chunk(2, dim=-1)
    y = torch.einsum("emi,eki->mek", nn.functional.silu(gate) * up, w2)
    return (y.gather(1, ids[..., None].expand(-1, -1, K)) * weights[..., None]).sum(1)


def gradients(function, module: Experts, x: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x, *module.parameters()]
    loss = (function(x) * torch.linspace(-1, 1, K, dtype=x.dtype)).sum()
    return list(torch.autograd.grad(loss, leaves))


def check(got: list, module: Experts, x: torch.Tensor) -> None:
    wide = x.detach().double().requires_grad_()
    expected = gradients(lambda x: reference(module, x), module, wide)
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() < 1e-5 * b.norm()


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("decompose", [True, False])
def test_an_exported_program_trains(strict, decompose):
    module, x = Experts(), torch.randn(M, K, requires_grad=True)
    program = torch.export.export(module, (x,), strict=strict)
    if decompose:
        program = program.run_decompositions()
    exported = program.module()
    leaves = [x, *[exported.get_parameter(name) for name, _ in module.named_parameters()]]
    loss = (exported(x) * torch.linspace(-1, 1, K)).sum()
    check(list(torch.autograd.grad(loss, leaves)), module, x)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_keeps_gradients(tracing):
    module, x = Experts(), torch.randn(M, K, requires_grad=True)
    names = [name for name, _ in module.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    traced = make_fx(function, tracing_mode=tracing)(x, *module.parameters())
    check(gradients(lambda x: traced(x, *module.parameters()), module, x), module, x)


def exported_with_gradients() -> tuple[torch.export.ExportedProgram, nn.Module]:
    """All operators that record gradients, of weights of all kinds."""

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Experts()
            shapes = (E, 2, K), (E, 2 * I, 2), (E, 2, I), (E, K, 2)
            self.adapter = nn.ParameterList([torch.randn(*shape) for shape in shapes])
            for name in ("w13", "w2"):
                weight = moe_ops.quantize(getattr(self.experts, name), "int4_w4a16:channel")
                setattr(self, name, nn.Parameter(weight, requires_grad=False))

        def forward(self, x):
            weights, ids = moe_ops.route(x[:, :E], TOP_K)
            y = self.experts(x)
            w13, w2 = self.experts.w13, self.experts.w2
            adapters = moe_ops.LoRA(*self.adapter)
            y = y + moe_ops.fused_experts(y, w13, w2, weights, ids, adapters=adapters)
            y = y + moe_ops.fused_experts(y, self.w13, self.w2, weights, ids)
            return y, moe_ops.grouped_linear(x, w13, torch.tensor([2, 3, 3, 6]).int())

    module, rows = All(), torch.export.Dim("rows", min=1, max=64)
    return torch.export.export(module, (torch.randn(M, K),), dynamic_shapes=[{0: rows}]), module


def test_programs_hand_no_empty_lists_to_operators_that_record():
    """AOTInductor passes them as None, which these are not given."""
    program, _ = exported_with_gradients()
    nodes = [n for n in program.graph.nodes if "experts_forward" in str(n.target)]
    assert len(nodes) == 3
    assert all([scales for node in nodes for scales in node.args if isinstance(scales, list)])


@pytest.mark.slow
def test_aot_inductor_runs_programs_that_train(tmp_path):
    program, module = exported_with_gradients()
    package = torch._inductor.aoti_compile_and_package(program, package_path=f"{tmp_path}/all.pt2")
    run, x = torch._inductor.aoti_load_package(package), torch.randn(13, K)
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode):
            for got, want in zip(run(x), module(x), strict=True):
                assert (got - want).norm() < 1e-5 * want.norm()


def test_transforms_are_refused_in_a_sentence():
    module, x = Experts(), torch.randn(M, K)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match="moe_ops cannot be differentiated by torch.func"):
            transform(lambda x: module(x).sum())(x)
    offsets = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="moe_ops cannot be differentiated by torch.func"):
        torch.func.vjp(lambda x: moe_ops.grouped_linear(x, module.w13, offsets), x)


def test_vmap_is_refused_in_a_sentence_about_batches():
    module, x = Experts(), torch.randn(2, M, K)
    refused = pytest.raises(RuntimeError, match="moe_ops cannot be batched by torch.func.vmap")
    with refused:
        torch.func.vmap(module)(x)
    with refused:  # the transform that is looked at is the innermost one
        torch.func.grad(lambda x: torch.func.vmap(module)(x).sum())(x)
    with pytest.raises(RuntimeError, match="moe_ops cannot be differentiated by torch.func"):
        torch.func.vmap(torch.func.grad(lambda x: module(x).sum()))(x)


def test_a_strictly_exported_grouped_linear_trains():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, I, K) / K**0.5)

        def forward(self, x, offsets):
            return moe_ops.grouped_linear(x, self.weight, offsets)

    module, x = Linear(), torch.randn(M, K, requires_grad=True)
    offsets = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    exported = torch.export.export(module, (x, offsets), strict=True).module()
    weigh = torch.linspace(-1, 1, I)
    got = torch.autograd.grad((exported(x, offsets) * weigh).sum(), [x, exported.weight])
    expert = torch.tensor([0, 0, 1, 3, 3, 3])
    wide, weight = x.detach().double().requires_grad_(), module.weight.double()
    y = torch.einsum("mk,mnk->mn", wide, weight[expert])
    expected = torch.autograd.grad((y * weigh).sum(), [wide, module.weight])
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() < 1e-5 * b.double().norm()


@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_a_graph_without_gradients_runs_in_grad_mode_and_says_so(scheme, monkeypatch):
    module, x = Experts("torch"), torch.randn(M, K)
    if scheme:
        for name in ("w13", "w2"):
            weight = moe_ops.quantize(getattr(module, name).detach(), scheme)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
    with torch.no_grad():
        expected = module(x)
        exported = torch.export.export(module, (x,)).module()
    monkeypatch.setattr(library, "_warned", False)
    x.requires_grad_()
    with pytest.warns(UserWarning, match="captured without gradients"):
        out = exported(x)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert not out.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported(x)  # said once
        with torch.no_grad():
            exported(x)
