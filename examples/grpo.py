"""A step of GRPO on a CPU whose experts compute the same bits in rollout and training.

A model generates a group of completions of a prompt, one token of each at a time (rollout), and is
then trained on the whole sequences at once. For the policy's ratio, the training forward computes
the log-probabilities of the rollout anew. It sees the same tokens in other batches, so that
kernels for few and for many tokens round otherwise, and routers choose other experts.

With `moe_ops.set_batch_invariant(True)` each expert layer, fed what it was fed in the rollout,
returns the same bits in the training forward: that is checked. `record_routing` and
`replay_routing` give training the experts of the rollout. What each of them leaves of the
difference of the log-probabilities is printed; attention and linear layers are torch's and differ
in any case.

    python examples/grpo.py --group 4 --tokens 24
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import NamedTuple

import torch
from common import check, table, title
from tiny_moe.model import encode, load
from torch import Tensor

import moe_ops
import moe_ops.integrations.transformers as moe_transformers

PROMPT = "def main("


class Rollout(NamedTuple):
    """What a group of completions leaves for training."""

    sequences: Tensor  # (group, prompt + tokens)
    prompt_tokens: int
    log_probs: Tensor  # (group, tokens)
    routing: list[Tensor]  # of each router, (group * (prompt + tokens - 1), top_k)
    experts: list[list[tuple[Tensor, ...]]]  # inputs and output of each call of each expert layer


def expert_layers(model) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def roll_out(model, prompt: Tensor, group: int, tokens: int) -> Rollout:
    """A group of sampled completions of one prompt."""
    layers = expert_layers(model)
    calls: list[list[tuple[Tensor, ...]]] = [[] for _ in layers]
    handles = [
        layer.register_forward_hook(lambda _, inputs, out, to=to: to.append((*inputs, out)))
        for layer, to in zip(layers, calls, strict=True)
    ]
    prompts = prompt.expand(group, -1)
    most = group * (prompts.shape[1] + tokens)
    with torch.no_grad(), moe_transformers.record_routing(model, most) as record:
        found = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    for handle in handles:
        handle.remove()
    chosen = found.sequences[:, prompts.shape[1] :, None]
    logits = torch.stack(found.logits, 1).float()
    log_probs = logits.log_softmax(-1).gather(2, chosen)[..., 0]
    routing = record.sequences(group, prompts.shape[1])
    return Rollout(found.sequences, prompts.shape[1], log_probs, routing, calls)


def log_probs_of(model, rollout: Rollout) -> Tensor:
    """Those of the completions' tokens, (group, tokens), by one forward pass with gradients."""
    logits = model(input_ids=rollout.sequences[:, :-1], use_cache=False).logits.float()
    chosen = rollout.sequences[:, 1:, None]
    return logits.log_softmax(-1).gather(2, chosen)[:, rollout.prompt_tokens - 1 :, 0]


def rows_that_differ(model, rollout: Rollout) -> int:
    """Tokens whose rows differ, of all expert layers: the rollout's, and those of a training
    forward on the tokens of all its calls at once, in another order."""
    differ = 0
    for layer, calls in zip(expert_layers(model), rollout.experts, strict=True):
        x, ids, weights, out = (torch.cat(parts) for parts in zip(*calls, strict=True))
        order = torch.randperm(x.shape[0])
        leaf = x[order].clone().requires_grad_()
        trained = layer(leaf, ids[order], weights[order])
        assert trained.requires_grad
        differ += int((trained != out[order]).any(1).sum())
    return differ


def step(model, rollout: Rollout, lr: float) -> float:
    """One update by the group's relative rewards: here, the mean of a text's bytes, so that
    lower-case letters count more than spaces.

    Returns the largest |ratio - 1|, which is 0 where training computes what the rollout did.
    """
    texts = rollout.sequences[:, rollout.prompt_tokens :]
    rewards = texts.float().mean(1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with moe_transformers.replay_routing(model, rollout.routing):
        ratio = (log_probs_of(model, rollout) - rollout.log_probs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        (-gain.mean()).backward()
    gates = [layer.mlp.gate for layer in model.model.layers]
    check(
        all(gate.weight.grad.any() for gate in gates),
        "every router gets gradients through the recorded experts",
    )
    optimizer.step()
    return float((ratio.detach() - 1).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--group", type=int, default=4, help="completions of the prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a completion")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    model, prompt = load("moe_ops", torch.bfloat16), encode(args.prompt)

    rows, rollout = [], None
    for invariant in (False, True):
        moe_ops.set_batch_invariant(invariant)
        title(f"batch_invariant={invariant}")
        torch.manual_seed(0)
        rollout = roll_out(model, prompt, args.group, args.tokens)
        differ = rows_that_differ(model, rollout)
        total = sum(call[0].shape[0] for calls in rollout.experts for call in calls)
        print(f"  {differ} of {total} rows of expert layers differ from the rollout's")
        if invariant:
            check(differ == 0, "expert layers return the rollout's bits in a training forward")
        for replayed in (False, True):
            replay = moe_transformers.replay_routing(model, rollout.routing)
            with replay if replayed else nullcontext():
                difference = (log_probs_of(model, rollout) - rollout.log_probs).detach().abs()
            numbers = (f"{difference.mean():.1e}", f"{difference.max():.1e}")
            rows.append((f"{invariant}", f"{replayed}", *numbers))

    title("log-probabilities of training less those of the rollout")
    table(("batch_invariant", "replayed", "mean", "largest"), rows)

    title("one step of GRPO")
    assert rollout is not None
    off_policy = step(model, rollout, args.lr)
    print(f"  before it, ratios of the policy are within {off_policy:.1e} of 1")
    with torch.no_grad(), moe_transformers.replay_routing(model, rollout.routing):
        moved = (log_probs_of(model, rollout) - rollout.log_probs).abs().max()
    check(bool(moved.isfinite()) and float(moved) > 0, "the step moved the policy")


if __name__ == "__main__":
    main()
