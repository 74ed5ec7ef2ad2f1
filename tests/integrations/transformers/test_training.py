"""transformers models that train on moe_ops, through Trainer, with checkpointing and sharded by
FSDP2, against the same steps with transformers' own experts in fp64."""

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

import moe_ops.integrations.transformers as moe_transformers
from moe_ops.planning import training
from tests.integrations.transformers.test_families import Calls, build, relative

CUDA = torch.cuda.is_available()
STEPS, LAYERS = 3, 2
TOKENS = torch.randint(0, 90, (2 * STEPS, 6), generator=torch.Generator().manual_seed(2))


def model_of(family, implementation, dtype, layers=LAYERS, device="cpu"):
    model = build(family, layers).to(device, dtype)
    model.set_experts_implementation(implementation)
    return model


def compare(got, want, within=1e-5):
    """Tensors by name with those of fp64, of which all are there."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert relative(got[name], value) < within, name


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# --- Trainer -------------------------------------------------------------------------------------


class Losses(transformers.Trainer):
    """Keeps what each step lost, unrounded."""

    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        self.losses = [*getattr(self, "losses", ()), loss.double()]
        return loss


def trained(family, implementation, dtype, folder, checkpointing):
    """The losses of some steps and the weights behind them."""
    model = model_of(family, implementation, dtype)
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.1
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    arguments = transformers.TrainingArguments(
        **{"output_dir": str(folder), "save_strategy": "no", "report_to": [], "use_cpu": True},
        **{"max_steps": STEPS, "per_device_train_batch_size": 2, "disable_tqdm": True},
        **{"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"},
        max_grad_norm=1.0,
    )
    if checkpointing:
        model.gradient_checkpointing_enable()
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = Losses(model=model, args=arguments, train_dataset=data)
    with Calls() as calls:
        trainer.train()
    after = {n: p.detach() for n, p in model.named_parameters()}
    moved = {n for n in after if relative(after[n], before[n]) > 1e-4}
    return torch.stack(trainer.losses), after, moved, calls.names


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_trainer(family, checkpointing, tmp_path):
    want, weights, moved, calls = trained(family, "eager", torch.float64, tmp_path, checkpointing)
    assert not calls and {n.rsplit(".", 1)[1] for n in moved} >= {"gate_up_proj", "down_proj"}
    got, found, _, calls = trained(family, "moe_ops", torch.float32, tmp_path, checkpointing)
    ran = STEPS * LAYERS
    assert calls.count("experts_forward") == ran * (2 if checkpointing else 1)
    assert calls.count("experts_backward") == ran
    assert relative(got, want) < 1e-5
    compare(found, weights)


# --- routers -------------------------------------------------------------------------------------


def fine_tuned(implementation, dtype, folder):
    """The losses of TRL's steps with adapters on the experts alone, and the adapters behind
    them."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({str(i): i for i in range(90)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="1", pad_token="2"
    )
    model = model_of("qwen3_moe", implementation, dtype)
    arguments = trl.SFTConfig(
        **{"output_dir": str(folder), "save_strategy": "no", "report_to": [], "use_cpu": True},
        **{"max_steps": STEPS, "per_device_train_batch_size": 2, "disable_tqdm": True},
        **{"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "bf16": False},
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    rows = datasets.table.InMemoryTable.from_pydict(
        dict.fromkeys(("input_ids", "labels"), TOKENS.tolist())
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset(rows, fingerprint="tokens"),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            target_modules=[],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            r=4,
            init_lora_weights=False,
        ),
    )
    generator = torch.Generator().manual_seed(4)
    adapters = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    for p in adapters.values():
        p.data = (torch.randn(p.shape, generator=generator) * 0.1).to(dtype)
    if implementation == "moe_ops":
        moe_transformers.attach(trainer.model)
    before = {n: p.detach().clone() for n, p in adapters.items()}
    with Calls() as calls:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    moved = {n: p.detach() - before[n] for n, p in adapters.items()}
    return losses, moved, calls.names


@pytest.mark.slow
def test_trl(tmp_path):
    _, want, calls = fine_tuned("eager", torch.float64, tmp_path)
    assert not calls and len(want) == 4 * LAYERS
    _, got, calls = fine_tuned("moe_ops", torch.float32, tmp_path)
    assert calls.count("lora_experts_forward") == calls.count("lora_experts_backward")
    assert calls.count("lora_experts_forward") == STEPS * LAYERS
    compare(got, want, within=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_gradients_of_routers_and_the_auxiliary_loss(family):
    outs, grads = [], []
    for implementation, dtype in (("eager", torch.float64), ("moe_ops", torch.float32)):
        model = model_of(family, implementation, dtype)
        model.config.router_aux_loss_coef = 0.5
        ids = TOKENS[:2]
        out = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        out.loss.backward()
        outs.append(out)
        grads.append(gradients(model))
    want, got = outs
    assert relative(got.aux_loss, want.aux_loss) < 1e-6 and relative(got.loss, want.loss) < 1e-6
    for a, b in zip(got.router_logits, want.router_logits, strict=True):
        assert relative(a, b) < 1e-5
    assert sum(".gate." in name or ".router." in name for name in grads[0]) == LAYERS
    compare(grads[1], grads[0])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_step_on_a_gpu_is_fused(family, monkeypatch):
    """One layer, so that both route alike; gpt-oss has biases and transposed weights."""
    asked = []
    why_not = training.why_not_kernels

    def noted(*args):
        asked.append(why_not(*args))
        return asked[-1]

    monkeypatch.setattr(training, "why_not_kernels", noted)
    ids, grads = TOKENS[:2].cuda(), []
    for implementation in ("eager", "moe_ops"):
        model = model_of(family, implementation, torch.bfloat16, 1, "cuda")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append(gradients(model))
    assert asked == [None, None]
    compare(grads[1], grads[0], within=8 * 2.0**-8)


# --- several processes ---------------------------------------------------------------------------


def shard_and_step(rank, file, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    training.INTERPRETED = False  # of Triton's interpreter this process knows half
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    models = [
        model_of("qwen3_moe", "eager", torch.float64),
        model_of("qwen3_moe", "moe_ops", torch.float32),
    ]
    for layer in models[1].model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(models[1], mesh=mesh)
    # each process has other tokens, as many as the others: their losses' mean is that of all
    share = TOKENS.chunk(world)[rank]
    for ids, model in zip((TOKENS, share), models, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with Calls() as calls:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            assert calls.names.count("experts_backward") == (LAYERS if model is models[1] else 0)
            optimizer.step()
    sharded = models[1].model.layers[0].mlp.experts.gate_up_proj
    assert sharded.to_local().shape[0] * world == sharded.shape[0]
    compare({n: g.full_tensor() for n, g in gradients(models[1]).items()}, gradients(models[0]))
    weights = {n: p.detach().full_tensor() for n, p in models[1].named_parameters()}
    compare(weights, {n: p.detach() for n, p in models[0].named_parameters()})
    steps = []
    for replayed in (False, True):  # routers of sharded weights, whole in a forward
        models[1].zero_grad()
        within = moe_transformers.record_routing(models[1], share.numel())
        if replayed:
            within = moe_transformers.replay_routing(models[1], ids)
        with within as record:
            models[1](input_ids=share, labels=share, use_cache=False).loss.backward()
        ids = ids if replayed else record.ids()
        steps.append({n: grad.full_tensor() for n, grad in gradients(models[1]).items()})
    compare(steps[1], steps[0])
    dist.destroy_process_group()


@pytest.mark.slow
def test_fsdp(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # processes run what users' do
    torch.multiprocessing.spawn(shard_and_step, (str(tmp_path / "rendezvous"), 2), nprocs=2)
