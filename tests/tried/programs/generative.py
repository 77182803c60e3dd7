"""Generative models of lucidrains: quantised autoencoders, transformers, and denoising diffusion."""

from __future__ import annotations

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, GaussianDiffusion1D, Unet, Unet1D
from judge import Global, noise, program, square
from torch import nn
from vector_quantize_pytorch import FSQ, LFQ, ResidualVQ, SimVQ, VectorQuantize
from x_transformers import (
    AutoregressiveWrapper,
    ContinuousTransformerWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

LIBRARIES = ["vector-quantize-pytorch", "x-transformers", "denoising-diffusion-pytorch"]
PLANE = [(2, 1, 1, 1), (1, 1, 3, 1), (1, 1, 2, 2)]
LINE = [(2, 1, 1), (1, 1, 3)]
TOKENS = [(2, 1), (1, 3)]


class Quantised(nn.Module):
    """An autoencoder of images with a quantiser between its halves."""

    def __init__(self, quantiser):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 4, stride=2, padding=1))
        self.quantiser = quantiser
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1)
        )

    def forward(self, x):
        quantised, *others = self.quantiser(self.encoder(x))
        return self.decoder(quantised), *others


def autoencoded(model, x):
    """Return what two steps of Adam see: the image, the codes, and the losses."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for _ in range(2):
        optimiser.zero_grad()
        y, *others = model(x)
        loss = (y - x).square().mean() + sum(o.sum() for o in others if o.is_floating_point())
        loss.backward()
        optimiser.step()
        history.append([loss.detach(), y.detach(), *(o.detach() for o in others)])
    return history


class Rows(nn.Module):
    """A quantiser of rows of features that is given images."""

    def __init__(self, quantiser):
        super().__init__()
        self.quantiser = quantiser

    def forward(self, x):
        quantised, *others = self.quantiser(x.flatten(2).transpose(1, 2))
        return quantised.transpose(1, 2).reshape(x.shape), *others


def quantised(name, make, tolerance=1e-9):
    def build():
        return autoencoded, Quantised(make()), Global(noise(2, 3, 12, 8).requires_grad_())

    name = f"{name} of an autoencoder, two steps of Adam"
    program("vector-quantize-pytorch", name=name, grids=PLANE, tolerance=tolerance)(build)


# Codebooks cast what they quantise to float32. FSQ, SimVQ and LFQ, as it is set up here, do not.
quantised("VectorQuantize (in float32)", lambda: VectorQuantize(8, 16, accept_image_fmap=True), 1e-6)
quantised(
    "VectorQuantize with cosines (in float32)",
    lambda: VectorQuantize(8, 16, use_cosine_sim=True, accept_image_fmap=True),
    1e-6,
)
quantised(
    "VectorQuantize with a learnt codebook (in float32)",
    lambda: VectorQuantize(8, 16, learnable_codebook=True, ema_update=False, accept_image_fmap=True),
    1e-6,
)
quantised("ResidualVQ (in float32)", lambda: Rows(ResidualVQ(dim=8, num_quantizers=3, codebook_size=16)), 1e-6)
quantised("SimVQ", lambda: SimVQ(dim=8, codebook_size=16, channel_first=True))
quantised("FSQ", lambda: FSQ([5, 4, 3], dim=8))
quantised("LFQ", lambda: LFQ(codebook_size=16, dim=8, force_quantization_f32=False).double())


def tokens(length, seed=1):
    return Global(torch.arange(4 * length).reshape(4, length) * seed % 19)


def language(**options):
    return TransformerWrapper(num_tokens=19, max_seq_len=24, attn_layers=Decoder(dim=16, depth=2, heads=2, **options))


def predicted(model, ids):
    loss = model(ids)
    loss.backward()
    return loss


def decoder_program(name, **options):
    def build():
        return predicted, AutoregressiveWrapper(language(attn_dim_head=8, **options)), tokens(13, 7)

    program("x-transformers", name=f"{name}, AutoregressiveWrapper's loss", grids=TOKENS)(build)


decoder_program("Decoder with rotary positions and GLU", rotary_pos_emb=True, ff_glu=True, ff_swish=True)
decoder_program("Decoder with ALiBi and RMSNorm", alibi_pos_bias=True, use_rmsnorm=True)
decoder_program("Decoder with relative positions, normed queries", rel_pos_bias=True, attn_qk_norm=True)
decoder_program("Decoder with grouped keys and flash attention", attn_kv_heads=1, attn_flash=True)


@program("x-transformers", name="greedy generate of a Decoder", grids=TOKENS)
def generated():
    def generate(model, ids):
        return model.generate(ids, 6, temperature=0.0, cache_kv=True)

    return generate, AutoregressiveWrapper(language(attn_dim_head=8, rotary_pos_emb=True)), tokens(7, 7)


@program("x-transformers", name="XTransformer, encoder and decoder, its loss", grids=TOKENS)
def translated():
    def step(model, source, target):
        loss = model(source, target)
        loss.backward()
        return loss

    model = XTransformer(
        dim=16,
        enc_num_tokens=19,
        enc_depth=1,
        enc_heads=2,
        enc_max_seq_len=24,
        dec_num_tokens=19,
        dec_depth=1,
        dec_heads=2,
        dec_max_seq_len=24,
    )
    return step, model, tokens(12, 7), tokens(13, 5)


@program("x-transformers", name="ViTransformerWrapper", grids=PLANE)
def image_transformer():
    layers = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    model = ViTransformerWrapper(image_size=24, patch_size=4, num_classes=5, attn_layers=layers)
    return square, model, Global(noise(2, 3, 24, 24).requires_grad_())


@program("x-transformers", name="ContinuousTransformerWrapper", grids=[(2, 1, 1), (1, 3, 1)])
def continuous():
    layers = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    model = ContinuousTransformerWrapper(dim_in=5, dim_out=4, max_seq_len=24, attn_layers=layers)
    return square, model, Global(noise(4, 13, 5).requires_grad_())


def diffused(model, x, added):
    """Return the loss at times and with noise that are given."""
    loss = model(x, times=torch.tensor([3, 7]), noise=added)
    loss.backward()
    return loss


def diffusion_program(name, make, shape, grids):
    def build():
        x = Global(noise(*shape).sigmoid().requires_grad_())
        return diffused, make(), x, Global(noise(*shape, seed=1))

    program("denoising-diffusion-pytorch", name=name, grids=grids)(build)


def unet(**options):
    return Unet(dim=8, dim_mults=(1, 2), full_attn=(False, True), attn_heads=2, attn_dim_head=4, **options)


diffusion_program(
    "Unet, GaussianDiffusion's loss",
    lambda: GaussianDiffusion(unet(), image_size=16, timesteps=10),
    (2, 3, 16, 16),
    PLANE,
)
diffusion_program(
    "Unet, GaussianDiffusion's loss of the noise, weighted by its ratio to the signal",
    lambda: GaussianDiffusion(
        unet(), image_size=16, timesteps=10, objective="pred_noise", beta_schedule="cosine", min_snr_loss_weight=True
    ),
    (2, 3, 16, 16),
    PLANE,
)
diffusion_program(
    "Unet1D, GaussianDiffusion1D's loss",
    lambda: GaussianDiffusion1D(
        Unet1D(dim=8, dim_mults=(1, 2), channels=3, attn_heads=2, attn_dim_head=4), seq_length=24, timesteps=10
    ),
    (2, 3, 24),
    LINE,
)


@program(
    "denoising-diffusion-pytorch", name="two steps back of GaussianDiffusion, with noise that is given", grids=PLANE
)
def sampled():
    def sample(model, x, *added):
        with torch.no_grad():
            for t, one in zip((7, 3), added, strict=True):
                mean, _, log_variance, _ = model.p_mean_variance(x=x, t=torch.full((2,), t), clip_denoised=True)
                x = mean + (0.5 * log_variance).exp() * one
        return x

    model = GaussianDiffusion(unet(), image_size=16, timesteps=10).eval()
    return sample, model, *(Global(noise(2, 3, 16, 16, seed=k)) for k in range(3))
