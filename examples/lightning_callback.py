"""Lightning inside a memory budget: one callback more.

    python examples/lightning_callback.py [--budget 60%] [--steps 8]

A small transformer with random weights. Needs lightning.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.integrations.lightning import MemoryPlanCallback


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True) for _ in range(6)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, wanted = batch
        for layer in self.layers:
            x = layer(x)
        loss = (x - wanted).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(steps: int, folder: str, callbacks: list[Any]) -> list[float]:
    lightning.seed_everything(0, verbose=False)
    model = Model()
    data = torch.utils.data.TensorDataset(torch.randn(256, 64, 64), torch.randn(256, 64, 64))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(model, loader)
    return model.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    callback = MemoryPlanCallback(options.budget)
    with tempfile.TemporaryDirectory() as folder, hp.configure_swap(disk_dir=folder):
        plain = trained(options.steps, folder, [])
        planned = trained(options.steps, folder, [callback])
    print(callback.plan)
    print(f"losses as it is:       {plain}")
    print(f"losses with the plan:  {planned}")
    print("equal" if plain == planned else "DIFFERENT")


if __name__ == "__main__":
    main()
