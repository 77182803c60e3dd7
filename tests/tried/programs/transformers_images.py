"""transformers: models of images, with the losses of their labels."""

from __future__ import annotations

import torch
from judge import Global, noise, program
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    ResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
)

LIBRARIES = ["transformers", "timm", "scipy"]
GRIDS = [(2, 1, 1, 1), (1, 1, 2, 1)]
SMALL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def embed(model, x):
    y = model(x).last_hidden_state
    y.square().mean().backward()
    return y


def image(samples=2, size=32):
    return Global(noise(samples, 3, size, size).requires_grad_())


@program("transformers", name="ViTModel", grids=GRIDS)
def vit():
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=32,
        patch_size=8,
        **SMALL,
    )
    return embed, ViTModel(config).double(), image()


@program("transformers", name="SwinModel", grids=GRIDS)
def swin():
    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
        **SMALL,
    )
    return embed, SwinModel(config).double(), image()


@program("transformers", name="SegformerForSemanticSegmentation and its loss", grids=GRIDS)
def segformer():
    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
        num_labels=4,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        **SMALL,
    )

    def train(model, x, labels):
        found = model(pixel_values=x, labels=labels)
        found.loss.backward()
        return found.loss, found.logits

    labels = torch.arange(2 * 64 * 64).reshape(2, 64, 64) % 4
    return train, SegformerForSemanticSegmentation(config).double(), image(size=64), Global(labels, axes=(0, 2, 3))


def labels_of_boxes():
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.4, 0.3, 0.2]], dtype=torch.float64)
    return [
        {"class_labels": torch.tensor([0, 2]), "boxes": boxes},
        {"class_labels": torch.tensor([1]), "boxes": boxes[:1] + 0.1},
    ]


@program("transformers", name="DetrForObjectDetection and its loss", grids=GRIDS)
def detr():
    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
        num_labels=3,
        dropout=0.0,
    )

    def train(model, x, labels):
        found = model(pixel_values=x, labels=labels)
        found.loss.backward()
        return found.loss, found.logits, found.pred_boxes

    return train, DetrForObjectDetection(config).double(), image(size=64), labels_of_boxes()


@program("transformers", name="Mask2FormerForUniversalSegmentation", grids=GRIDS)
def mask2former():
    backbone = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        **SMALL,
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        use_pretrained_backbone=False,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=4,
        num_labels=3,
        dropout=0.0,
    )

    def segment(model, x):
        found = model(pixel_values=x)
        found.masks_queries_logits.square().mean().backward()
        return found.class_queries_logits, found.masks_queries_logits

    return segment, Mask2FormerForUniversalSegmentation(config).double(), image(size=64)
