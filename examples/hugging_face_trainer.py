"""Hugging Face's Trainer inside a memory budget: two lines more than without.

    python examples/hugging_face_trainer.py [--budget 60%] [--steps 8]

A small Llama with random weights learns to count. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hyper_parallel as hp
from hyper_parallel.integrations.hugging_face import fit_in_memory


class Counting(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(128)) % 256
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(steps: int, folder: str) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=6, num_attention_heads=4, use_cache=False
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    return Trainer(LlamaForCausalLM(config), args, train_dataset=Counting())


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, hp.configure_swap(disk_dir=folder):
        plain = losses(make_trainer(options.steps, folder))
        trainer = make_trainer(options.steps, folder)
        callback = fit_in_memory(trainer, budget=options.budget)
        planned = losses(trainer)
    print(callback.plan)
    print(f"losses as it is:       {plain}")
    print(f"losses with the plan:  {planned}")
    print("equal" if plain == planned else "DIFFERENT")


if __name__ == "__main__":
    main()
