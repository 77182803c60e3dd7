"""MONAI: networks, losses of labels that become one-hot inside, and inference by sliding windows."""

from __future__ import annotations

from functools import partial

import torch
from judge import Global, fitted, noise, program, square
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss, DiceFocalLoss, DiceLoss, GeneralizedDiceLoss, TverskyLoss
from monai.networks.nets import SegResNet, SwinUNETR, UNet

LIBRARIES = ["monai", "einops"]
PLANE = [(2, 1, 1, 1), (1, 1, 3, 1), (1, 1, 2, 2)]
VOLUME = [(1, 1, 2, 1, 1), (1, 1, 1, 2, 2)]


def net():
    return UNet(2, 1, 3, channels=(4, 8), strides=(2,), num_res_units=1, norm="batch")


def segmented(criterion):
    labels = torch.arange(3 * 18 * 14).reshape(3, 1, 18, 14) % 3
    return partial(fitted, criterion), net(), Global(noise(3, 1, 18, 14).requires_grad_()), Global(labels)


@program("monai", name="DiceLoss(to_onehot_y) of a UNet", grids=PLANE)
def dice():
    return segmented(DiceLoss(to_onehot_y=True, softmax=True))


@program("monai", name="DiceCELoss(to_onehot_y) of a UNet", grids=PLANE)
def dice_and_entropy():
    return segmented(DiceCELoss(to_onehot_y=True, softmax=True))


@program("monai", name="DiceFocalLoss(to_onehot_y) of a UNet (in float32)", grids=PLANE, tolerance=1e-5)
def dice_and_focal():
    return segmented(DiceFocalLoss(to_onehot_y=True, softmax=True))


@program("monai", name="GeneralizedDiceLoss(to_onehot_y) of a UNet", grids=PLANE)
def generalized():
    return segmented(GeneralizedDiceLoss(to_onehot_y=True, softmax=True))


@program("monai", name="TverskyLoss(to_onehot_y) of a UNet", grids=PLANE)
def tversky():
    return segmented(TverskyLoss(to_onehot_y=True, softmax=True))


@program("monai", name="sliding_window_inference of a UNet", grids=PLANE)
def windows():
    def infer(model, x):
        with torch.no_grad():
            return sliding_window_inference(x, (8, 8), 2, model, overlap=0.25, mode="gaussian")

    return infer, net().eval(), Global(noise(2, 1, 18, 14))


@program("monai", name="SegResNet, volumes", grids=VOLUME)
def segresnet():
    model = SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2)
    return square, model, Global(noise(1, 1, 16, 24, 16).requires_grad_())


@program("monai", name="SwinUNETR", grids=PLANE)
def swin_unetr():
    model = SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)
    )
    return square, model, Global(noise(2, 1, 64, 64).requires_grad_())
