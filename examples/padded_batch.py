"""A captured decode step of fixed batch size in which some rows are empty.

A server captures its decode step for a few batch sizes and fills the rows it can. Here the batch
has eight rows; rows without a request carry expert id -1, and their hidden states are NaN. The
experts must give those rows exactly zero and the others what they would get alone. Which rows are
live changes between replays of the one graph.

    python examples/padded_batch.py
"""

from __future__ import annotations

import argparse

import torch
from common import check, title
from cuda_graph_decode import DecodeStep, capture
from tiny_moe.model import encode, held_out, load

import moe_ops  # noqa: F401  registers "moe_ops" with transformers

BATCH, PROMPT_LENGTH, STEPS = 8, 64, 12
SCHEDULE = ((1, 1, 1, 1, 1, 0, 0, 0), (1, 0, 1, 0, 1, 0, 0, 0), (0, 0, 1, 0, 0, 0, 0, 0))


class PaddedStep(DecodeStep):
    """A decode step in which only the rows that `live` (B,) bool marks hold a request."""

    def __init__(self, model, prompts: torch.Tensor, max_length: int) -> None:
        super().__init__(model, prompts, max_length)
        size, layers = len(prompts), model.model.layers
        self.live = torch.ones(size, dtype=torch.bool, device=prompts.device)
        # What the experts of each layer returned in the last step, (layers, B, K).
        self.returned = prompts.new_zeros(
            len(layers), size, model.config.hidden_size, dtype=model.dtype
        )
        for index, layer in enumerate(layers):
            layer.mlp.gate.register_forward_hook(self._send_empty_rows_nowhere)
            layer.mlp.experts.register_forward_hook(
                lambda _module, _args, out, kept=self.returned[index]: self._keep(kept, out)
            )

    def _send_empty_rows_nowhere(self, _module, _args, out):
        logits, weights, ids = out
        return logits, weights, ids.masked_fill(~self.live[:, None], -1)

    @staticmethod
    def _keep(kept: torch.Tensor, out: torch.Tensor) -> None:
        kept.copy_(out)

    def __call__(self) -> None:
        hidden = self.model.model.embed_tokens(self.tokens)
        hidden = hidden.masked_fill(~self.live[:, None, None], float("nan"))
        logits = self.model(
            inputs_embeds=hidden, past_key_values=self.cache, use_cache=True
        ).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    text = held_out()
    prompts = [text[4096 * row :][:PROMPT_LENGTH] for row in range(BATCH)]
    ids = torch.cat([encode(prompt, args.device) for prompt in prompts])
    length = PROMPT_LENGTH + STEPS * len(SCHEDULE) + 4

    title("eager transformers, all rows live")
    eager = DecodeStep(load("eager", device=args.device), ids, length)
    want = []
    for _ in range(STEPS * len(SCHEDULE)):
        eager()
        want.append(eager.tokens.clone())
    print(f"  {BATCH} requests, {len(want)} steps")

    title("moe_ops, empty rows routed to -1")
    step = PaddedStep(load("moe_ops", device=args.device), ids, length)
    if args.device == "cpu":
        print("  no CUDA graph on a CPU: the step runs uncaptured")
        advance = step
    else:
        advance = capture(step).replay
    step.rewind()
    done = 0
    for mask in SCHEDULE:
        live = torch.tensor(mask, dtype=torch.bool, device=args.device)
        step.live.copy_(live)
        for _ in range(STEPS):
            advance()
            if not torch.equal(step.tokens[live], want[done][live]):
                check(False, f"step {done}: live rows must give eager's tokens")
            if step.returned[:, ~live].any() or not step.returned[:, live].isfinite().all():
                check(False, f"step {done}: the experts must return zero for empty rows alone")
            done += 1
        rows = live.nonzero().flatten().tolist()
        check(True, f"rows {rows} live: {STEPS} tokens each as eager's; NaN rows got exactly zero")


if __name__ == "__main__":
    main()
