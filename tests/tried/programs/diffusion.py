"""diffusers: networks, autoencoders, and the steps of samplers."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from judge import Global, noise, program

LIBRARIES = ["diffusers", "transformers"]
GRIDS = [(2, 1, 1, 1), (1, 1, 3, 1), (1, 1, 2, 2)]
VIDEO = [(2, 1, 1, 1, 1), (1, 1, 1, 2, 1)]


def unet():
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    ).double()


@program("diffusers", name="UNet2DConditionModel", grids=GRIDS)
def conditioned():
    def train(model, x, text):
        y = model(x, torch.tensor([3, 7]), text).sample
        y.square().mean().backward()
        return y

    text = Global(noise(2, 5, 12), axes=(0, None, None))
    return train, unet(), Global(noise(2, 3, 18, 16).requires_grad_()), text


def sampled(kind):
    """Three steps of a sampler that draws no noise of its own."""

    def sample(model, x, text):
        scheduler = kind()
        scheduler.set_timesteps(3)
        with torch.no_grad():
            for t in scheduler.timesteps:
                x = scheduler.step(model(scheduler.scale_model_input(x, t), t, text).sample, t, x).prev_sample
        return x

    return sample, unet().eval(), Global(noise(2, 3, 18, 16)), Global(noise(2, 5, 12), axes=(0, None, None))


@program("diffusers", name="DDIMScheduler, three steps of a UNet", grids=GRIDS)
def ddim():
    return sampled(DDIMScheduler)


@program("diffusers", name="EulerDiscreteScheduler, three steps of a UNet", grids=GRIDS)
def euler():
    return sampled(EulerDiscreteScheduler)


@program("diffusers", name="DPMSolverMultistepScheduler, three steps of a UNet", grids=GRIDS)
def dpm():
    return sampled(DPMSolverMultistepScheduler)


@program("diffusers", name="AutoencoderKL", grids=GRIDS)
def autoencoder():
    def train(model, x):
        y = model(x).sample
        (y - x).square().mean().backward()
        return y

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    return train, model.double(), Global(noise(2, 3, 18, 16).requires_grad_())


@program("diffusers", name="AutoencoderKLWan (upsamples in float32)", grids=VIDEO, tolerance=1e-6)
def wan_autoencoder():
    def code(model, x):
        y = model(x).sample
        y.square().mean().backward()
        return y

    model = AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True]
    )
    return code, model.double(), Global(noise(2, 3, 5, 16, 16).requires_grad_())


@program("diffusers", name="WanTransformer3DModel (its norms in float32)", grids=VIDEO, tolerance=1e-5)
def wan():
    def train(model, x, text):
        y = model(x, torch.tensor([3, 7]), text).sample
        y.square().mean().backward()
        return y

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
        rope_max_seq_len=32,
    )
    text = Global(noise(2, 5, 12), axes=(0, None, None))
    return train, model.double(), Global(noise(2, 4, 3, 8, 8).requires_grad_()), text
