"""Lightning: its Trainer and its Fabric, with what they do around a model."""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from judge import Global, noise, program
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

LIBRARIES = ["lightning"]
GRIDS = [(2, 1, 1, 1), (1, 1, 3, 1)]

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))


class Fit(lightning.LightningModule):
    """A model whose losses are logged."""

    def __init__(self, model):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch, number):
        x, target = batch
        loss = (self.model(x) - target).square().mean()
        self.log("loss", loss.item())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        x, target = batch
        loss = (self.model(x) - target).abs().mean()
        self.log("val_loss", loss.item())
        self.losses.append(loss.item())

    def configure_optimizers(self):
        optimiser = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimiser], [torch.optim.lr_scheduler.StepLR(optimiser, 1, gamma=0.5)]


def trained(model, *tensors, **options):
    batches = list(zip(tensors[::2], tensors[1::2], strict=True))
    loaders = [DataLoader(part, batch_size=None) for part in (batches[:2], batches[2:])]
    fit = Fit(model)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=SingleDeviceStrategy("cpu"),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(fit, *loaders)
    return fit.losses


def batches():
    return [Global(noise(4, c, 9, 8, seed=2 * k + c)) for k in range(3) for c in (3, 2)]


def enter(name, **options):
    for weights in ("replicated", "sharded"):

        def build():
            callbacks = options.get("callbacks", list)

            def step(model, *tensors):
                return trained(model, *tensors, **options | {"callbacks": callbacks()})

            return step, net(), *batches()

        program("lightning", name=f"{name}, {weights} weights", grids=GRIDS, weights=weights)(build)


enter("Trainer with clipping and schedule", gradient_clip_val=0.1)
enter(
    "Trainer with accumulation and EarlyStopping",
    accumulate_grad_batches=2,
    callbacks=lambda: [EarlyStopping("val_loss")],
)


@program("lightning", name="Trainer with StochasticWeightAveraging", grids=GRIDS)
def averaged():
    def step(model, *tensors):
        return trained(model, *tensors, callbacks=[StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)])

    return step, net(), *batches()


@program("lightning", name="Fabric", grids=GRIDS)
def fabric():
    def step(model, *tensors):
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model, optimiser = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for x, target in zip(tensors[::2], tensors[1::2], strict=True):
            optimiser.zero_grad()
            loss = (model(x) - target).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimiser, max_norm=0.1)
            optimiser.step()
            losses.append(loss.item())
        return losses

    return step, net(), *batches()
