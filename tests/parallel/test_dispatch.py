"""Dispatchers: which deployments they serve, and what they refuse."""

import copy
import gc
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from moe_ops import MoEConfig, MoELayer, ParallelConfig, quantize
from moe_ops.meta.symmetric import SymmetricLayout
from moe_ops.nn.spread import send_tokens
from moe_ops.parallel import all2all, dispatch, mailboxes, wire
from moe_ops.parallel.dispatch import DISPATCHERS, make_dispatcher, register_dispatcher
from moe_ops.parallel.dispatchers import AllGatherReduceScatter, AllReduce, AllToAll
from moe_ops.parallel.symmetric_memory import SymmetricMemory

DISPATCHER = AllGatherReduceScatter("group", 2, 4)
KINDS = pytest.mark.parametrize("kind", DISPATCHERS.values(), ids=DISPATCHERS)


def group(size=2, rank=1):
    """What is asked of a process group."""
    return SimpleNamespace(group_name="group", size=lambda: size, rank=lambda: rank)


def parallel(**fields):
    return ParallelConfig.make(**{"enable_expert_parallel": True, **fields})


def tokens(M=3, ids=torch.int64):
    return torch.randn(M, 8), torch.zeros(M, 2, dtype=ids), torch.rand(M, 2)


@pytest.mark.parametrize(
    "deployment",
    [
        {"dp_size": 2},
        {"pcp_size": 2},
        {"tp_size": 2, "sp_size": 2},
        {"tp_size": 2, "sp_size": 2, "dp_size": 3},
        {"dp_size": 2, "enable_eplb": True},  # whose ids are physical
    ],
)
@KINDS
def test_serves_devices_with_tokens_of_their_own(kind, deployment):
    assert kind.why_not(parallel(**deployment)) == []


def expect_reasons(kind, deployment, reasons):
    """All of them, in this order, also from make_dispatcher."""
    found = kind.why_not(parallel(**deployment))
    assert len(found) == len(reasons)
    for reason, begin in zip(found, reasons, strict=True):
        assert reason.startswith(begin)


@pytest.mark.parametrize(
    ("deployment", "reasons"),
    [
        ({}, ["it has one device; pass the sizes of more, or leave the group out"]),
        ({"tp_size": 2}, ["2 devices hold experts, but 1 of them have tokens of their own"]),
        ({"tp_size": 2, "dp_size": 2}, ["4 devices hold experts, but 2 of them"]),
    ],
)
@KINDS
def test_every_reason_is_given(kind, deployment, reasons):
    expect_reasons(kind, deployment, reasons)
    if "dp_size" in deployment:  # else AllReduce serves it
        config = parallel(**deployment, all2all_backend=kind.name)
        with pytest.raises(ValueError, match=f"{kind.name} cannot serve this ParallelConfig: "):
            make_dispatcher(config, group(), max_num_tokens=4)


@pytest.mark.parametrize(
    ("deployment", "reasons"),
    [
        ({}, ["it has one device"]),
        (
            {"dp_size": 2},
            ["2 devices have tokens of their own, which others lack; allgather_reducescatter"],
        ),
        ({"tp_size": 2, "pcp_size": 2}, ["2 devices have tokens of their own"]),
    ],
)
def test_every_reason_against_all_reduce_is_given(deployment, reasons):
    expect_reasons(AllReduce, deployment, reasons)
    if parallel(**deployment).num_dispatchers == 1:
        with pytest.raises(ValueError, match="all_reduce cannot serve this ParallelConfig: "):
            make_dispatcher(parallel(**deployment), group(), max_num_tokens=4)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("backend", ["all_to_all", "mori"])  # which sends nothing here
def test_devices_with_the_same_tokens_get_all_reduce(whole_experts, backend):
    config = parallel(
        tp_size=2, tp_rank=1, enable_expert_parallel=whole_experts, all2all_backend=backend
    )
    made = make_dispatcher(config, group(), max_num_tokens=4, reduce_dtype=torch.float32)
    assert made == AllReduce("group", 2, 4, torch.float32)
    with pytest.raises(ValueError, match="group must have .p_size=2 ranks .* as .p_rank=1, got 3"):
        make_dispatcher(config, group(3), max_num_tokens=4)


@KINDS
def test_columns_of_experts_may_have_tokens_of_their_own(kind):
    config = parallel(
        dp_size=2, dp_rank=1, enable_expert_parallel=False, all2all_backend=kind.name
    )
    assert make_dispatcher(config, group(), max_num_tokens=4) == kind("group", 2, 4)


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        (AllGatherReduceScatter("group", 2, 4), {}),
        (
            AllGatherReduceScatter("group", 2, 4, torch.bfloat16),
            {"reduce_dtype": torch.bfloat16},
        ),
        (AllToAll("group", 2, 4, label="MoELayer x"), {"label": "MoELayer x"}),
    ],
)
def test_dispatchers_are_made_by_name_and_can_be_copied(wanted, options):
    config = parallel(dp_size=2, dp_rank=1, all2all_backend=wanted.name)
    made = make_dispatcher(config, group(), max_num_tokens=4, **options)
    assert made == wanted and DISPATCHERS[made.name] is type(made)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("name", all2all.LIBRARIES)
def test_dispatchers_of_other_libraries_are_refused_by_name(name, monkeypatch):
    """None of them is installed here or, of FlashInfer, adapted."""
    config = parallel(dp_size=2, dp_rank=1, all2all_backend=name)
    library = all2all.LIBRARIES[name]
    monkeypatch.setattr(all2all.importlib.util, "find_spec", lambda module: None)
    said = f"got '{name}': moe_ops has no adapter for it; its library {library.module} is not inst"
    with pytest.raises(ValueError, match=f"{said}.*register_dispatcher, or make the layer with"):
        make_dispatcher(config, group(), max_num_tokens=4)
    monkeypatch.setattr(all2all.importlib.util, "find_spec", lambda module: object())
    with pytest.raises(ValueError, match=r"has no adapter for it\. Choose one of those"):
        make_dispatcher(config, group(), max_num_tokens=4)


def test_dispatchers_of_others_can_be_registered(monkeypatch):
    monkeypatch.setattr(dispatch, "DISPATCHERS", dict(DISPATCHERS))

    @dataclass(frozen=True)
    class Adapter(AllToAll):
        name = "deepep_v2"

    register_dispatcher(Adapter)
    register_dispatcher(Adapter)
    config = parallel(dp_size=2, dp_rank=1, all2all_backend="deepep_v2")
    assert make_dispatcher(config, group(), max_num_tokens=4) == Adapter("group", 2, 4)
    with pytest.raises(ValueError, match="that no other has, got 'deepep_v2'"):
        register_dispatcher(dataclass(frozen=True)(type("Other", (Adapter,), {})))


def test_layers_are_named_in_errors(world):
    world(1, 2)
    config = MoEConfig(4, 2, 64, 64, parallel=parallel(dp_size=2, dp_rank=1))
    for name, label in (
        ("layers.3.mlp", "MoELayer layers.3.mlp"),
        ("", "a MoELayer of 4 experts"),
    ):
        layer = MoELayer.from_config(config, group=torch.distributed.group.WORLD, name=name)
        assert layer.dispatcher.label == label


def test_experts_add_outputs_up_where_no_gradients_are_recorded(world):
    world(1, 2)
    config = MoEConfig(4, 2, 8, 8, parallel=parallel(dp_size=2, dp_rank=1))
    layer = MoELayer.from_config(config, group=torch.distributed.group.WORLD).requires_grad_(False)
    layer.dispatcher = SimpleNamespace(exchange="its name", dispatch=lambda *given: given)
    experts, given = layer.experts, tokens()
    assert send_tokens(layer, *given).added
    assert not send_tokens(layer, given[0].requires_grad_(), *given[1:]).added
    with torch.no_grad():
        assert send_tokens(layer, *given).added
        layer.dispatcher.sends_rows_later = True
        layer.dispatcher.dispatch_routing = lambda *routing: routing[::-1]
        sent = send_tokens(layer, *given)
        assert (sent.rows, sent.ids, sent.weights) == (given[0], given[2], given[1])
        layer.backend = "triton"  # which would gather rows before it begins
        assert send_tokens(layer, *given)[:3] == given
        layer.backend, layer.router_weight_on_input = "auto", True
        assert send_tokens(layer, *given)[:3] == given
    made, given = experts.down_proj.detach().clone().requires_grad_(), tokens()
    del experts.down_proj
    experts.down_proj = made  # no parameter
    assert not send_tokens(layer, *given).added


def test_rows_are_sent_later_where_a_backend_sends_them():
    assert wire.pays_later("") and wire.pays_later("fp8_block", backend="deep_gemm")
    assert not wire.pays_later("", backend="triton") and not wire.pays_later("int4_w4a16")
    assert not wire.pays_later("fp8_block", "deep_gemm_ue8m0")
    assert wire.pays_later("fp8_block", backend="cutlass")


def test_rows_behind_their_routing_travel_quantized_where_a_kernel_does_so(world, monkeypatch):
    world(1, 2)
    given = parallel(dp_size=2, dp_rank=1, all2all_backend="symmetric_memory")
    config = MoEConfig(4, 2, 128, 128, parallel=given, max_num_tokens=4096)
    for scheme, on_gpu, quantized in (
        ("fp8_block", True, True),
        ("fp8_block", False, False),
        ("fp8_block:ue8m0", True, False),
        ("", True, False),
    ):
        layer = MoELayer.from_config(config, group=torch.distributed.group.WORLD)
        layer.requires_grad_(False)
        experts = layer.experts
        for name in ("gate_up_proj", "down_proj") if scheme else ():
            packed = quantize(getattr(experts, name).data, scheme)
            setattr(experts, name, torch.nn.Parameter(packed, False))
        x, *routing = torch.randn(3, 128), torch.zeros(3, 2).int(), torch.rand(3, 2)
        told = type(layer.dispatcher)
        monkeypatch.setattr(told, "dispatch_routing", lambda self, *routing: routing)
        x = x.to("meta") if on_gpu else x
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.is_meta))
            sent = send_tokens(layer, x, *routing)
        assert sent.rows is x and sent.added
        told = layer.dispatcher
        known = told.exchange_quantized if quantized else told.exchange
        assert sent.options["exchange"] == known
        layer.dispatcher = SimpleNamespace(
            exchange="its name", sends_rows_later=True, dispatch_routing=lambda *routing: routing
        )
        sent = send_tokens(layer, torch.randn(3, 128), *routing)
        assert sent.options["exchange"] == "its name"


@pytest.mark.parametrize("schemes", [("fp8_block", ""), ("", "fp8_block")])
def test_rows_of_experts_with_two_schemes_are_not_sent_later(world, monkeypatch, schemes):
    """Which no backend sends behind their routing, nor takes quantized on their way."""
    world(1, 2)
    config = MoEConfig(4, 2, 128, 128, parallel=parallel(dp_size=2, dp_rank=1))
    layer = MoELayer.from_config(config, group=torch.distributed.group.WORLD)
    layer.requires_grad_(False)
    for name, scheme in zip(("gate_up_proj", "down_proj"), schemes, strict=True):
        if scheme:
            packed = quantize(getattr(layer.experts, name).data, scheme)
            setattr(layer.experts, name, torch.nn.Parameter(packed, False))
    layer.dispatcher = SimpleNamespace(
        exchange="its name",
        exchange_quantized="quantized its name",
        send_quantized=False,
        sends_rows_later=True,
        dispatch=lambda x, ids, weights: (x, ids, weights),
        dispatch_routing=lambda *routing: pytest.fail("rows travel behind their routing"),
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.is_meta))
    x, *routing = torch.randn(3, 128, device="meta"), torch.zeros(3, 2).int(), torch.rand(3, 2)
    sent = send_tokens(layer, x, *routing)
    assert sent.added and sent.options["exchange"] == "its name"


def test_mailboxes_live_as_long_as_their_group(world, monkeypatch):
    """A later group may have the same name."""
    monkeypatch.setattr(mailboxes, "_make", lambda *_: mailboxes._Kept(object(), None))
    found = []
    for _ in range(2):
        world(0, 2)
        name = torch.distributed.group.WORLD.group_name
        asked = name, torch.device("cpu"), "tokens", SymmetricLayout(2, 4, 32), "a layer"
        found.append(mailboxes.mailbox_of(*asked))
        assert mailboxes.mailbox_of(*asked) is found[-1]
        assert len(mailboxes._kept) == 1
    assert found[0] is not found[1]
    torch.distributed.destroy_process_group()
    gc.collect()
    assert len(mailboxes._kept) == 0


@KINDS
@pytest.mark.parametrize("unbacked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_calls_refuse_too_many_tokens(world, kind, unbacked):
    """Not cut off by the padding to max_num_tokens."""
    world(0, 2)
    dispatcher = kind(torch.distributed.group.WORLD.group_name, 2, 4)
    torch._dynamo.reset()
    call = torch.compile(dispatcher.dispatch, fullgraph=True, backend="eager", dynamic=True)
    for M, most in ((3, 4), (4, 4), (5, 0)):
        given = tokens(M)
        if unbacked:
            for tensor in given:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
        if most:
            assert call(*given)[0].shape == (8, 8)
        else:
            with pytest.raises(Exception, match="max_num_tokens|Runtime assertion"):
                call(*given)


def test_traced_code_names_an_exchange():
    """Where integers of a dispatcher may be symbols."""
    dispatcher = SymmetricMemory("group", 2, 4)
    torch._dynamo.reset()
    call = torch.compile(
        lambda: dispatcher.exchange, fullgraph=True, backend="eager", dynamic=True
    )
    assert call() == dispatcher.exchange


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: AllGatherReduceScatter("group", 2, 0),
            "max_num_tokens must be at least 1",
        ),
        (lambda: AllGatherReduceScatter("group", 2.0, 1), "group_size must be an integer"),
        (
            lambda: AllGatherReduceScatter("group", 2, 1, torch.float64),
            "reduce_dtype must be torch.float32, .*or None, got torch.float64",
        ),
        (
            lambda: AllReduce("group", 2, 4).combine(torch.randn(4, 8), 3),
            "out must have M=3 rows, got 4",
        ),
        (
            lambda: AllReduce("group", 2, 4).dispatch(*tokens(5)),
            "x must have at most max_num_tokens=4 rows, got 5",
        ),
        (lambda: AllToAll("group", 0, 4), "group_size must be at least 1, got 0"),
        (
            lambda: make_dispatcher(
                parallel(dp_size=2, dp_rank=1, all2all_backend="all_to_all"),
                group(),
                max_num_tokens=4,
                reduce_dtype=torch.float32,
            ),
            "reduce_dtype must be left out with all_to_all, whose options are label",
        ),
        (
            lambda: make_dispatcher(
                parallel(dp_size=2, all2all_backend="naive"), group(), max_num_tokens=4
            ),
            "must be one of allgather_reducescatter, .*got 'naive': it names no exchange",
        ),
        (
            lambda: register_dispatcher(AllReduce),
            "kind must have a name of deepep_high_throughput, .*, got 'all_reduce'",
        ),
        (lambda: register_dispatcher(ParallelConfig), "kind must be a dataclass with group_name"),
        (
            lambda: make_dispatcher(parallel(dp_size=2), group(), max_num_tokens=4),
            "group must have ep_size=2 ranks with this process as ep_rank=0, got 2 ranks .* as 1",
        ),
        (
            lambda: make_dispatcher(parallel(dp_size=3, dp_rank=1), group(), max_num_tokens=4),
            "group must have ep_size=3 ranks .*got 2 ranks",
        ),
        (
            lambda: DISPATCHER.dispatch(*tokens(5)),
            "x must have at most max_num_tokens=4 rows, got 5; pass them in several calls",
        ),
        (lambda: DISPATCHER.dispatch(*tokens(ids=torch.uint8)), "topk_ids must be int32 or int64"),
        (
            lambda: DISPATCHER.dispatch(*tokens(3)[:2], torch.rand(2, 2)),
            "topk_weights must have as many rows as x, M=3, got 2",
        ),
        (
            lambda: DISPATCHER.dispatch(tokens()[0], torch.zeros(3, dtype=torch.int64), None),
            r"topk_ids must have shape \(M, top_k\), got a 1-D tensor",
        ),
        (
            lambda: DISPATCHER.combine(torch.randn(4, 8), 3),
            "out must have the 8 rows that dispatch returned, got 4",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("group", [None, torch.distributed.GroupMember.NON_GROUP_MEMBER])
def test_layers_say_that_there_is_no_group(group):
    """Without init_process_group torch.distributed.group.WORLD is None."""
    config = MoEConfig(4, 2, 64, 64, parallel=parallel(dp_size=2))
    assert MoELayer.from_config(config).dispatcher is None
    with pytest.raises(ValueError, match="group must be a torch.distributed.ProcessGroup .*init"):
        MoELayer.from_config(config, group=group)
