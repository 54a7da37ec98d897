"""A training loop with Accelerate inside a memory budget: one call after `prepare`.

    python examples/accelerate_loop.py [--budget 60%] [--steps 8]

A small GPT-2 with random weights. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import hyper_parallel as hp
from hyper_parallel.integrations.accelerate import fit_in_memory


def trained(steps: int, budget: str | None) -> tuple[list[float], hp.MemoryPlan | None]:
    accelerator = Accelerator()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=96, n_layer=6, n_head=4, use_cache=False)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (64, 128))]
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model = GPT2LMHeadModel(config)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    plan = None
    if budget is not None:
        plan = fit_in_memory(accelerator, model, next(iter(loader)), budget, optimizer=optimizer)
    torch.manual_seed(1)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses[:steps], plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, hp.configure_swap(disk_dir=folder):
        plain, _ = trained(options.steps, None)
        planned, plan = trained(options.steps, options.budget)
    print(plan)
    print(f"losses as it is:       {plain}")
    print(f"losses with the plan:  {planned}")
    print("equal" if plain == planned else "DIFFERENT")


if __name__ == "__main__":
    main()
