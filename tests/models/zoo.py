"""Models by other people, small and unmodified: from MONAI, timm and segmentation-models-pytorch.

Each is built in float64 with few channels, on images whose sides do not divide by the number of workers (or, where a
model wants multiples of 16 or 32, whose deeper levels do not). Dropout is off: masks are tested with the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision_operators
from torch import Tensor, nn

CLASSES = 3
Loss = Callable[[Any, Tensor], Tensor]  # of output and target


@dataclass(frozen=True)
class Entry:
    """A model, what it is fed, and the loss it is trained with.

    Attributes:
        name: library, class and number of dims; the name of its tests.
        build: makes the module; its parameters are set by ``module``.
        shape: of the input: batch, channels, and space.
        loss: of output and target, both of the whole batch.
        target: the target's name, one of ``labels`` (one class a sample), ``mask`` (one class a pixel), ``image``
            (a number for each class and pixel).
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Loss
    target: str

    def module(self) -> nn.Module:
        """The module in training mode, the same each time.

        Noise is added to all parameters, because many models start with some weights at zero, and then the gradients
        of those before them are zero, too.
        """
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = self.build().double().train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in module.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise, alpha=0.05)
        return module

    def batch(self, number: int = 0) -> tuple[Tensor, Tensor]:
        """Input and target of the batch of this number, the same each time."""
        generator = torch.Generator().manual_seed(2 + number)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        samples, space = self.shape[0], self.shape[2:]
        if self.target == "image":
            return x, torch.rand(samples, CLASSES, *space, generator=generator, dtype=torch.float64)
        labelled = (samples,) if self.target == "labels" else (samples, *space)
        return x, torch.randint(0, CLASSES, labelled, generator=generator)


def dice_loss(y: Tensor, mask: Tensor) -> Tensor:
    """One minus the soft Dice coefficient, averaged over samples and classes, as people write it themselves."""
    y = y.softmax(dim=1)
    wanted = torch.zeros_like(y).scatter_(1, mask.unsqueeze(1), 1.0)
    space = tuple(range(2, y.ndim))
    overlap = (y * wanted).sum(dim=space)
    volume = y.sum(dim=space) + wanted.sum(dim=space)
    return 1 - ((2 * overlap + 1e-5) / (volume + 1e-5)).mean()


def dice_and_cross_entropy(y: Tensor, mask: Tensor) -> Tensor:
    return dice_loss(y, mask) + F.cross_entropy(y, mask)


def monai_dice(y: Tensor, mask: Tensor) -> Tensor:
    from monai.losses import DiceCELoss

    return DiceCELoss(to_onehot_y=True, softmax=True)(y, mask.unsqueeze(1))


def smp_dice(y: Tensor, mask: Tensor) -> Tensor:
    from segmentation_models_pytorch.losses import DiceLoss

    return DiceLoss("multiclass")(y, mask)


def _monai(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import monai.networks.nets as nets

        return getattr(nets, name)(**options)

    return build


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torchvision_operators.declare_missing()
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return build


def _timm_class(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torchvision_operators.declare_missing()
        import timm.models

        return getattr(timm.models, name)(num_classes=CLASSES, **options)

    return build


def _regnet() -> nn.Module:
    torchvision_operators.declare_missing()
    from timm.models.regnet import RegNet, RegNetCfg

    widths = RegNetCfg(depth=8, w0=8, wa=12.0, wm=2.5, group_size=8, se_ratio=1.0, stem_width=8)
    return RegNet(widths, num_classes=CLASSES)


def _smp(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torchvision_operators.declare_missing()
        import segmentation_models_pytorch as smp

        return getattr(smp, name)("resnet18", encoder_weights=None, classes=CLASSES, **options)

    return build


def _monai_entries(dims: int) -> list[Entry]:
    """The networks of MONAI, each in 2-d and 3-d."""

    def entry(name: str, space: tuple[int, ...], loss: Loss, target: str, samples: int = 2, **options: Any) -> Entry:
        channels = 1 if dims == 3 else 2
        build = _monai(name, in_channels=channels, out_channels=CLASSES, spatial_dims=dims, **options)
        return Entry(f"monai-{name}-{dims}d", build, (samples, channels, *space), loss, target)

    flat = dims == 2
    return [
        entry("UNet", (36, 28) if flat else (12, 20, 12), dice_and_cross_entropy, "mask",
              channels=(4, 8, 8), strides=(2, 2), num_res_units=2),
        entry("BasicUNet", (39, 34) if flat else (33, 18, 17), monai_dice, "mask",
              features=(4, 4, 4, 8, 8, 4), norm="batch"),
        entry("SegResNet", (44, 28) if flat else (12, 20, 12), F.mse_loss, "image",
              init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        entry("DynUNet", (44, 28) if flat else (20, 12, 20), F.cross_entropy, "mask",
              kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 8], res_block=True),
        entry("UNETR", (48, 32) if flat else (32, 16, 16), dice_loss, "mask",
              img_size=(48, 32) if flat else (32, 16, 16), feature_size=4, hidden_size=24, mlp_dim=32, num_heads=3),
        entry("SwinUNETR", (96, 64) if flat else (32, 64, 32), F.cross_entropy, "mask", samples=2 if flat else 1,
              depths=(2, 2, 1, 1), num_heads=(1, 2, 4, 4), window_size=4, feature_size=12),
    ]  # fmt: skip


def _classifier(name: str, build: Callable[[], nn.Module], space: tuple[int, int], samples: int = 3) -> Entry:
    return Entry(f"timm-{name}", build, (samples, 3, *space), F.cross_entropy, "labels")


ENTRIES = [
    *_monai_entries(2),
    *_monai_entries(3),
    _classifier("resnet", _timm("resnet18", channels=(8, 8, 16, 16)), (70, 90)),
    _classifier("resnet-bottleneck", _timm("resnet50", layers=(1, 1, 1, 1), channels=(8, 8, 8, 8)), (70, 90)),
    _classifier("convnext", _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16)), (70, 90)),
    _classifier("efficientnet", _timm("test_efficientnet"), (70, 90)),
    _classifier("efficientnet-b0", _timm("efficientnet_b0"), (70, 90)),
    _classifier("mobilenetv3", _timm("mobilenetv3_small_050"), (70, 90)),
    _classifier("densenet", _timm("densenet121", growth_rate=4, block_config=(2, 2, 2, 2)), (70, 90)),
    _classifier("vgg", _timm_class("VGG", cfg=[4, "M", 8, "M", 8, 8, "M"], mlp_ratio=1 / 128), (60, 75)),
    _classifier("regnet", _regnet, (70, 90)),
    _classifier("vit", _timm_class("VisionTransformer", img_size=(40, 56), patch_size=8, embed_dim=24, depth=3,
                                   num_heads=3), (40, 56)),
    _classifier("swin", _timm_class("SwinTransformer", img_size=(48, 80), patch_size=4, window_size=4, embed_dim=12,
                                    depths=(2, 2), num_heads=(2, 3), drop_path_rate=0.0), (48, 80)),
    _classifier("mixer", _timm_class("MlpMixer", img_size=40, patch_size=8, num_blocks=2, embed_dim=24), (40, 40)),
    _classifier("sequencer", _timm("sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(12, 16, 16, 16),
                                   hidden_sizes=(4, 4, 4, 4)), (70, 56)),  # (recurrent layers along rows and columns)
    _classifier("xcit", _timm("xcit_nano_12_p16_224", depth=2, embed_dim=24, num_heads=3), (64, 96)),
    Entry("smp-Unet", _smp("Unet", decoder_channels=(16, 8, 8, 4, 4)), (2, 3, 96, 64), smp_dice, "mask"),
    Entry("smp-FPN", _smp("FPN", decoder_pyramid_channels=16, decoder_segmentation_channels=32, decoder_dropout=0.0),
          (2, 3, 96, 64), F.cross_entropy, "mask"),
    Entry("smp-DeepLabV3Plus", _smp("DeepLabV3Plus", decoder_channels=8, decoder_aspp_dropout=0.0),
          (2, 3, 96, 64), F.cross_entropy, "mask"),
]  # fmt: skip
