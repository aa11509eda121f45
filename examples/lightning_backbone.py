"""Lightning: its BackboneFinetuning under DDP, which unfreezes a backbone after some epochs.

The callback freezes the backbone before the strategy wraps the module, so DDP never learns of its parameters: once they
are unfrozen, plain DDP trains a backbone of its own on each rank, and says nothing. With SkipUnusedCallback they are
averaged, and as long as they are frozen nothing of them is sent. Run it with

    torchrun --nproc-per-node 2 examples/lightning_backbone.py
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ddp_hooks.integrations.lightning import SkipUnusedCallback

EPOCHS = 6


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.head.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune with Lightning's BackboneFinetuning.")
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test_images, test_labels = TensorDataset(images[300:], labels[300:]), images[:300], labels[:300]
    model = Classifier()
    saving = SkipUnusedCallback()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        limit_train_batches=max(1, steps // EPOCHS),
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=EPOCHS // 2), saving],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))

    if trainer.is_global_zero:
        correct = model(test_images).argmax(1) == test_labels
        print(f"accuracy: {correct.float().mean():.1%}")
        print(saving.state.stats())


if __name__ == "__main__":
    main()
