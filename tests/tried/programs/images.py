"""Images: kornia, metrics of torchmetrics, nnU-Net, and YOLO with its losses."""

from __future__ import annotations

from functools import partial

import kornia
import torch
import torchmetrics
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from judge import Global, fitted, noise, program, square
from torch import nn
from torchmetrics import classification, image
from torchmetrics import segmentation as segmented
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel, SegmentationModel

LIBRARIES = ["kornia", "torchmetrics", "dynamic_network_architectures", "ultralytics"]
GRIDS = [(2, 1, 1, 1), (1, 1, 3, 1), (1, 1, 2, 2)]
VOLUME = [(2, 1, 1, 1, 1), (1, 1, 2, 1, 1), (1, 1, 1, 2, 2)]


def pictures(*shape, seed=0):
    return noise(*shape, seed=seed).sigmoid()


def kornia_program(name, function, tolerance=1e-9):
    """Enter a function of images, with the gradient of its mean square."""

    def build():
        return partial(square, function), Global(pictures(2, 3, 20, 18).requires_grad_())

    program("kornia", name=name, grids=GRIDS, tolerance=tolerance)(build)


def turned(x):
    angle, centre = torch.tensor([10.0, -20.0]), torch.tensor([[9.0, 10.0]] * 2)
    matrix = kornia.geometry.get_rotation_matrix2d(centre, angle, torch.ones(2, 2))
    return kornia.geometry.warp_affine(x, matrix, dsize=(20, 18))


def projected(x):
    corners = torch.tensor([[[0.0, 0.0], [17.0, 0.0], [17.0, 19.0], [0.0, 19.0]]] * 2)
    moved = corners + torch.tensor([[1.0, 2.0], [-2.0, 1.0], [0.0, -1.0], [2.0, 0.0]])
    return kornia.geometry.warp_perspective(
        x, kornia.geometry.get_perspective_transform(corners, moved), dsize=(20, 18)
    )


kornia_program("gaussian_blur2d", lambda x: kornia.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5)))
kornia_program(
    "spatial_gradient and sobel", lambda x: kornia.filters.sobel(x) + kornia.filters.spatial_gradient(x)[:, :, 0]
)
kornia_program("median_blur", lambda x: kornia.filters.median_blur(x, (3, 3)))
kornia_program("bilateral_blur", lambda x: kornia.filters.bilateral_blur(x, (3, 3), 0.2, (1.0, 1.0)))
kornia_program("canny, the magnitude", lambda x: kornia.filters.canny(x)[0])
kornia_program("warp_affine by rotations", turned)
kornia_program("warp_perspective", projected)
kornia_program("rgb_to_lab and rgb_to_hsv", lambda x: kornia.color.rgb_to_lab(x) / 100 + kornia.color.rgb_to_hsv(x))
kornia_program(
    "dilation and opening",
    lambda x: kornia.morphology.dilation(x, torch.ones(3, 3)) - kornia.morphology.opening(x, torch.ones(3, 3)),
)
kornia_program(
    "equalize_clahe", lambda x: kornia.enhance.equalize_clahe(x, grid_size=(2, 2), slow_and_differentiable=True)
)
kornia_program("build_pyramid, the smallest", lambda x: kornia.geometry.build_pyramid(x, 3)[-1])
kornia_program("harris_response", kornia.feature.harris_response)


class Classes(nn.Module):
    """A small network that gives a score of each class in each cell."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x):
        return self.net(x)


def kornia_loss(name, make):
    def build():
        labels = torch.arange(2 * 20 * 18).reshape(2, 20, 18) % 4
        return (
            partial(fitted, make()),
            Classes(),
            Global(noise(2, 3, 20, 18).requires_grad_()),
            Global(labels, (0, 2, 3)),
        )

    program("kornia", name=name, grids=GRIDS)(build)


kornia_loss("DiceLoss of a network", kornia.losses.DiceLoss)
kornia_loss("FocalLoss of a network", lambda: kornia.losses.FocalLoss(alpha=0.5, reduction="mean"))
kornia_loss("LovaszSoftmaxLoss of a network", kornia.losses.LovaszSoftmaxLoss)


@program("kornia", name="SSIMLoss and total_variation of a network", grids=GRIDS)
def structural():
    def criterion(y, target):
        y = y.sigmoid()
        return kornia.losses.ssim_loss(y, target, 5) + 0.01 * kornia.losses.total_variation(y).mean()

    model = nn.Conv2d(3, 3, 3, padding=1)
    return (
        partial(fitted, criterion),
        model,
        Global(noise(2, 3, 20, 18).requires_grad_()),
        Global(pictures(2, 3, 20, 18)),
    )


def measured(metrics, *batches):
    """Return what the metrics say of the batches together."""
    metrics = metrics.clone()
    for y, target in zip(batches[::2], batches[1::2], strict=True):
        metrics.update(y, target)
    return metrics.compute()


def metrics_program(name, make, y, target, grids, axes=None, tolerance=1e-9):
    """Enter metrics that see two batches. They stay as they are: what is distributed is what they are given."""

    def build():
        batches = [one for seed in (0, 1) for one in (Global(y(seed)), Global(target(seed), axes))]
        return partial(measured, torchmetrics.MetricCollection(make())), *batches

    program("torchmetrics", name=name, grids=grids, tolerance=tolerance)(build)


metrics_program(
    "Accuracy, F1Score, AUROC, AveragePrecision, ConfusionMatrix",
    lambda: [
        classification.MulticlassAccuracy(4),
        classification.MulticlassF1Score(4),
        classification.MulticlassAUROC(4),
        classification.MulticlassAveragePrecision(4, thresholds=20),
        classification.MulticlassConfusionMatrix(4),
    ],
    lambda seed: noise(24, 4, seed=seed).softmax(1),
    lambda seed: torch.arange(24) * (seed + 3) % 4,
    [(2, 1), (3, 1)],
    (0,),
)
metrics_program(
    "MeanSquaredError, R2Score, PearsonCorrCoef, SpearmanCorrCoef",
    lambda: [
        torchmetrics.MeanSquaredError(),
        torchmetrics.R2Score(),
        torchmetrics.PearsonCorrCoef(),
        torchmetrics.SpearmanCorrCoef(),
    ],
    lambda seed: noise(24, seed=seed),
    lambda seed: noise(24, seed=seed) + noise(24, seed=seed + 2),
    [(2,), (3,)],
)
metrics_program(
    "StructuralSimilarityIndexMeasure, PeakSignalNoiseRatio, UniversalImageQualityIndex, SpectralAngleMapper",
    lambda: [
        image.StructuralSimilarityIndexMeasure(data_range=1.0),
        image.PeakSignalNoiseRatio(data_range=1.0),
        image.UniversalImageQualityIndex(),
        image.SpectralAngleMapper(),
    ],
    lambda seed: pictures(2, 3, 20, 18, seed=seed),
    lambda seed: pictures(2, 3, 20, 18, seed=seed + 2),
    GRIDS,
)
metrics_program(
    "MeanIoU and GeneralizedDiceScore of planes of labels",
    lambda: [
        segmented.MeanIoU(4, input_format="index"),
        segmented.GeneralizedDiceScore(4, input_format="index"),
    ],
    lambda seed: torch.arange(2 * 20 * 18).reshape(2, 20, 18) * (seed + 3) % 4,
    lambda seed: torch.arange(2 * 20 * 18).reshape(2, 20, 18) * (seed + 5) % 4,
    [(2, 1, 1), (1, 3, 1), (1, 2, 2)],
)


def unet(kind, conv, blocks, deep_supervision):
    """Return a network of nnU-Net as its plans make it."""
    norm = nn.InstanceNorm3d if conv is nn.Conv3d else nn.InstanceNorm2d
    options = {"n_blocks_per_stage": blocks} if kind is ResidualEncoderUNet else {"n_conv_per_stage": blocks}
    model = kind(
        input_channels=1,
        n_stages=3,
        features_per_stage=(4, 8, 16),
        conv_op=conv,
        kernel_sizes=3,
        strides=(1, 2, 2),
        num_classes=3,
        n_conv_per_stage_decoder=1,
        conv_bias=True,
        norm_op=norm,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=deep_supervision,
        **options,
    )
    model.apply(model.initialize)
    return model


def dice_and_entropy(y, labels):
    """Return nnU-Net's loss: soft Dice without the background, and cross-entropy."""
    onehot = torch.zeros(y.shape, dtype=torch.bool).scatter_(1, labels, 1)[:, 1:]
    chances, axes = y.softmax(1)[:, 1:], tuple(range(2, y.ndim))
    common, total = (chances * onehot).sum(axes), chances.sum(axes) + onehot.sum(axes)
    return nn.functional.cross_entropy(y, labels[:, 0]) - ((2 * common + 1e-5) / (total + 1e-5).clip(1e-8)).mean()


def supervised(model, x, labels):
    outputs = model(x)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    losses = []
    for level, y in enumerate(outputs):
        smaller = nn.functional.interpolate(labels.to(y.dtype), y.shape[2:], mode="nearest").long()
        losses.append(dice_and_entropy(y, smaller) / 2**level)
    sum(losses).backward()
    return losses, outputs


@program("dynamic_network_architectures", name="PlainConvUNet with deep supervision, planes", grids=GRIDS)
def plain():
    labels = torch.arange(2 * 20 * 24).reshape(2, 1, 20, 24) % 3
    model = unet(PlainConvUNet, nn.Conv2d, (1, 1, 1), True)
    return supervised, model, Global(noise(2, 1, 20, 24).requires_grad_()), Global(labels)


@program("dynamic_network_architectures", name="ResidualEncoderUNet, volumes", grids=VOLUME)
def residual():
    labels = torch.arange(2 * 12 * 8 * 8).reshape(2, 1, 12, 8, 8) % 3
    model = unet(ResidualEncoderUNet, nn.Conv3d, (1, 1, 1), False)
    return supervised, model, Global(noise(2, 1, 12, 8, 8).requires_grad_()), Global(labels)


def detected(model, x, batch):
    loss, items = model.loss({"img": x, **batch})
    loss.sum().backward()
    return loss, items


def yolo(kind, name):
    """Return a training step of YOLO on two images with three boxes."""
    model = kind(name, nc=3, verbose=False)
    model.args = get_cfg()
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.6], [0.3, 0.6, 0.3, 0.3], [0.6, 0.4, 0.5, 0.4]])
    batch = {"batch_idx": torch.tensor([0, 0, 1]), "cls": torch.tensor([[0.0], [2.0], [1.0]]), "bboxes": boxes}
    if kind is SegmentationModel:
        batch["masks"] = (torch.arange(2 * 16 * 16).reshape(2, 16, 16) // 7 % 3).double()
        batch["sem_masks"] = batch["masks"].long()
    return detected, model.double().train(), Global(pictures(2, 3, 64, 64).requires_grad_()), batch


@program("ultralytics", name="YOLOv8n with its loss", grids=GRIDS)
def yolo8():
    return yolo(DetectionModel, "yolov8n.yaml")


@program("ultralytics", name="YOLO11n with its loss", grids=GRIDS)
def yolo11():
    return yolo(DetectionModel, "yolo11n.yaml")


@program("ultralytics", name="YOLO26n, detection end to end, with its loss", grids=GRIDS)
def yolo26():
    return yolo(DetectionModel, "yolo26n.yaml")


@program("ultralytics", name="YOLO11n of segmentation with its loss (of masks in float32)", grids=GRIDS, tolerance=1e-6)
def yolo_segments():
    return yolo(SegmentationModel, "yolo11n-seg.yaml")
