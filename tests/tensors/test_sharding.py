"""Weights sharded over processes by experts: FSDP2 around a layer, DTensors in fused_experts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_ops
from tests.support import oracle
from tests.support.cases import with_global_rows

SCHEMES = (
    "",
    "fp8_block",
    "fp8_tensor",
    "int8_w8a8",
    "int4_w4a16:g64:zp",
    "int4_w4a8",
    "nvfp4",
    "nvfp4, a global scale of each row",
    "mxfp4_w4a16",
    "int4_w4a16:g32:super:min",
)
E = 4


def quantized(plain, scheme):
    scheme, _, of_rows = scheme.partition(",")
    weight = moe_ops.quantize(plain, scheme)
    return with_global_rows(weight) if of_rows else weight


def layer_of(scheme, num_experts=E, seed=0):
    torch.manual_seed(seed)
    layer = moe_ops.MoELayer(256, 256, num_experts=num_experts, top_k=2).requires_grad_(False)
    for name in ("gate_up_proj", "down_proj") if scheme else ():
        weight = quantized(getattr(layer.experts, name).detach(), scheme)
        setattr(layer.experts, name, nn.Parameter(weight, requires_grad=False))
    return layer


def data_of(weight):
    if not getattr(weight, "scheme", None):
        return [weight]
    return [
        getattr(weight, name)
        for name in weight.__tensor_flatten__()[0]
        if name != "activation_scale"
    ]


def run(rank, file, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    x, router = torch.randn(6, 256), torch.rand(6, 2) + 0.1
    ids = torch.stack([torch.randperm(E)[:2] for _ in range(6)])
    parts = [init(3) for init in (torch.zeros, torch.ones)]
    with pytest.raises(
        ValueError, match="qdata must be a plain tensor, got a DTensor; pass its to_local"
    ):
        moe_ops.from_quantized("fp8_block", *[DTensor.from_local(t, mesh) for t in parts])
    for scheme in SCHEMES:
        layer = layer_of(scheme)
        want = layer(x)
        weights = layer.experts.w13, layer.experts.down_proj
        straight = moe_ops.fused_experts(x, *weights, router, ids)
        half = slice(rank * E // world, (rank + 1) * E // world)
        for placement in (Shard(0), Replicate()):
            own = [w[half].detach() if placement == Shard(0) else w.detach() for w in weights]
            sharded = [DTensor.from_local(w, mesh, [placement]) for w in own]
            assert torch.equal(moe_ops.fused_experts(x, *sharded, router, ids), straight), scheme

        fully_shard(layer, mesh=mesh)
        for _ in range(2):  # the second time memory of the first is used again
            assert torch.equal(layer(x), want), scheme
        layer.reshard()
        local = layer.experts.down_proj.to_local()
        assert local.shape[0] == E // world
        assert getattr(local, "scheme", "") == getattr(weights[1], "scheme", "")
        for got, all_of_it in zip(data_of(local), data_of(weights[1]), strict=True):
            mine = all_of_it[half]
            assert torch.equal(
                got.contiguous().view(torch.uint8), mine.contiguous().view(torch.uint8)
            )
    if world == 2:
        odd = layer_of("fp8_block", num_experts=3)
        fully_shard(odd, mesh=mesh)
        with pytest.raises(ValueError, match="experts that the 2 processes of FSDP divide, got 3"):
            odd(x)
    dist.destroy_process_group()


def run_gradients(rank, file, world):
    """Tokens differ from rank to rank; each computes the loss of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(0)
    E, K, I = 5, 16, 8
    sizes = (E, 2 * I, K), (E, K, I), (E, 2 * I), (E, K)
    values = [torch.randn(size) * size[-1] ** -0.5 for size in sizes]
    of_ranks = [
        (torch.randn(5, K), torch.rand(5, 2), torch.stack([torch.randperm(E)[:2]] * 5))
        for _ in range(world)
    ]
    leaves = [t.double().requires_grad_() for t in values]

    def loss_of(tokens, parameters, function):
        w13, w2, b13, b2 = parameters
        return function(tokens[0], w13, w2, *tokens[1:], w13_bias=b13, w2_bias=b2).square().sum()

    losses = [loss_of(tokens, leaves, oracle.experts) for tokens in of_ranks]
    wanted = torch.autograd.grad(torch.stack(losses).sum(), leaves)
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    whole = Replicate()
    cases = [(line, [placement]) for placement in (whole, Shard(0), Shard(1), Shard(2))]
    cases += [(square, placements) for placements in ([whole, whole], [Shard(1), Shard(0)])]
    for mesh, placements in cases:
        parameters = []
        for t in values:
            there = [p if p == whole or p.dim < t.dim() else whole for p in placements]
            parameters.append(nn.Parameter(distribute_tensor(t, mesh, there)))
        loss_of(of_ranks[rank], parameters, moe_ops.fused_experts).backward()
        for parameter, want in zip(parameters, wanted, strict=True):
            assert parameter.grad.placements == parameter.placements
            got = parameter.grad.full_tensor()
            assert oracle.relative_error(got, want) < 1e-5, placements

    offsets = torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32)
    want = torch.zeros(values[0].shape, dtype=torch.float64)
    for x, *_ in of_ranks:
        leaf = values[0].double().requires_grad_()
        oracle.grouped_linear(x, leaf, offsets).square().sum().backward()
        want += leaf.grad
    weight = nn.Parameter(distribute_tensor(values[0], line, [Shard(0)]))
    moe_ops.grouped_linear(of_ranks[rank][0], weight, offsets).square().sum().backward()
    assert oracle.relative_error(weight.grad.full_tensor(), want) < 1e-5

    layer, plain = [moe_ops.MoELayer(256, 256, num_experts=4, top_k=2) for _ in range(2)]
    plain.load_state_dict(layer.state_dict())
    fully_shard(layer, mesh=line)  # which takes the mean of ranks, as DistributedDataParallel
    layer(torch.full((2, 256), rank + 1.0)).square().sum().backward()
    for other in range(world):
        plain(torch.full((2, 256), other + 1.0)).square().sum().backward()
    got = layer.experts.down_proj.grad.full_tensor()
    assert oracle.relative_error(got, plain.experts.down_proj.grad / world) < 1e-5
    dist.destroy_process_group()


class Block(nn.Module):
    """A layer that trains in front of quantized experts that do not."""

    def __init__(self, scheme, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.Linear(256, 256)
        self.moe = layer_of(scheme, seed=seed)

    def forward(self, x):
        return self.moe(self.norm(x))


def run_replicas(rank, file, world):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    x = torch.randn(6, 256)
    for scheme in SCHEMES[1:]:
        block = Block(scheme, seed=rank)
        with torch.profiler.profile(profile_memory=True) as profile:
            parallel = nn.parallel.DistributedDataParallel(block)
        allocated = max(event.self_cpu_memory_usage for event in profile.events())
        assert allocated < 2 * block.moe.experts.down_proj.numel()  # bytes of 16-bit weights
        want = Block(scheme)
        assert torch.equal(parallel(x), want(x)), scheme
        parallel(x).sum().backward()
        want(x).sum().backward()
        grad = want.norm.weight.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(block.norm.weight.grad, grad / world)
        weight = quantized(torch.randn(4, 32, 256), scheme)
        dist.broadcast(weight, 0)
        parts = [None] * world
        dist.all_gather_object(parts, weight.dequantize())
        assert torch.equal(parts[0], parts[-1])
        for bucket in (1, 1 << 30):  # each alone; all in one, as DistributedDataParallel sends
            states, wanted = [], []
            for seed, tensors in ((rank, states), (0, wanted)):
                block = Block(scheme, seed)
                tensors += [p.detach() for p in block.parameters()]
                tensors += [t.transpose(1, 2).clone() for t in tensors if t.dim() == 3]
                tensors.append(block.norm.weight.detach().clone())
            dist._broadcast_coalesced(dist.group.WORLD, states, bucket, 0)
            for got, want in zip(states, wanted, strict=True):
                values = [t.dequantize() if t.dim() == 3 else t for t in (got, want)]
                assert torch.equal(*values), (scheme, bucket)
    dist.destroy_process_group()


def run_checkpoints(rank, folder, world):
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    file = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(6, 256)
    for scheme in SCHEMES[1:]:
        layer = layer_of(scheme)
        want = layer(x)
        for sharded in (False, True):
            where = f"{folder}/{scheme}-{sharded}"
            if sharded:
                fully_shard(layer, mesh=mesh)
            checkpoint.save(layer.state_dict(), checkpoint_id=where)
            checkpoint.async_save(layer.state_dict(), checkpoint_id=where + "-async").result()
            for saved in (where, where + "-async"):
                again = layer_of(scheme)
                for name in ("gate_up_proj", "down_proj"):
                    weight = getattr(again.experts, name)
                    weight.data = torch.zeros_like(weight.data)
                again.gate.weight.zero_()
                if sharded:
                    fully_shard(again, mesh=mesh)
                state = again.state_dict()
                checkpoint.load(state, checkpoint_id=saved)
                again.load_state_dict(state)
                assert torch.equal(again(x), want), (scheme, saved)
    dist.barrier()  # one that ends while another still saves was seen to abort
    dist.destroy_process_group()


@pytest.fixture
def compiled_kernels(monkeypatch):
    """Launched processes run what users' processes do: in the interpreter the kernels of training
    took ten times as long as the rest.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("world", [2, 1])
def test_processes(world, tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path / "rendezvous"), world), nprocs=world)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_gradients_of_tokens_that_differ(tmp_path):
    """Those of the sum of all ranks' losses, in fp64; under FSDP2 of its mean."""
    torch.multiprocessing.spawn(run_gradients, (str(tmp_path / "rendezvous"), 2), nprocs=2)


@pytest.fixture
def fake_mesh():
    """Of two processes, of which the other does not exist."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_what_may_be_no_dtensor(fake_mesh):
    from torch.distributed.tensor import DTensor

    x, w13, w2 = torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    router, ids = torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64)
    tokens = {"hidden_states": x, "topk_weights": router, "topk_ids": ids}
    given = {**tokens, "w13": w13.requires_grad_(), "w2": w2}
    given["expert_map"] = torch.arange(2)
    for name in (*tokens, "expert_map"):
        changed = given | {name: DTensor.from_local(given[name], fake_mesh)}
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(ValueError, match=f"{name} must be a plain .* to_local"),
            ):
                moe_ops.fused_experts(**changed)
    matrices = torch.randn(2, 1, 8), torch.randn(2, 8, 1)
    adapter = moe_ops.LoRA(*[DTensor.from_local(t, fake_mesh) for t in matrices], None, None)
    with pytest.raises(ValueError, match="adapters.a13 must be a plain tensor, got a DTensor"):
        moe_ops.fused_experts(**given, adapters=adapter)


@pytest.mark.slow
def test_dtensors_compile_whole(fake_mesh):
    from torch.distributed.tensor import DTensor

    torch._dynamo.reset()
    x, w13, w2 = torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    router, ids = torch.rand(3, 1), torch.tensor([[0], [1], [0]])
    want = moe_ops.fused_experts(x, w13, w2, router, ids)
    weights = [nn.Parameter(DTensor.from_local(t, fake_mesh)) for t in (w13, w2)]
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, backend="aot_eager")
    got = compiled(x, *weights, router, ids)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert weights[0].grad.placements == weights[0].placements


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("world", [2, 1])
def test_distributed_data_parallel(world, tmp_path):
    torch.multiprocessing.spawn(run_replicas, (str(tmp_path / "rendezvous"), world), nprocs=world)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("world", [2, 1])
def test_distributed_checkpoints(world, tmp_path):
    torch.multiprocessing.spawn(run_checkpoints, (str(tmp_path), world), nprocs=world)
