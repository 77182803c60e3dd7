"""transformers: models of language, with the losses of their labels, and generation."""

from __future__ import annotations

import torch
from judge import Global, program
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LEDConfig,
    LEDForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LongformerConfig,
    LongformerModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

LIBRARIES = ["transformers"]
GRIDS = [(2, 1), (1, 3)]


def tokens(samples=2, length=12, count=30):
    return Global(torch.arange(samples * length).reshape(samples, length).mul(7) % (count - 3) + 3)


def train(model, ids, **options):
    found = model(input_ids=ids, labels=ids, **options)
    found.loss.backward()
    return found.loss, found.logits


LLAMA = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@program("transformers", name="LlamaForCausalLM and its loss (cast to float32)", grids=GRIDS, tolerance=1e-5)
def llama():
    return train, LlamaForCausalLM(LlamaConfig(**LLAMA)).double(), tokens()


@program("transformers", name="LlamaForCausalLM, generate", grids=GRIDS)
def llama_generates():
    def generate(model, ids):
        return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)

    return generate, LlamaForCausalLM(LlamaConfig(**LLAMA)).double().eval(), tokens()


@program("transformers", name="GPT2LMHeadModel, generate with beams", grids=[(2, 1)])
def gpt2_generates():
    def generate(model, ids):
        return model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=False, pad_token_id=0)

    config = GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return generate, GPT2LMHeadModel(config).double().eval(), tokens()


@program("transformers", name="T5ForConditionalGeneration and its loss", grids=GRIDS)
def t5():
    config = T5Config(
        vocab_size=30,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return train, T5ForConditionalGeneration(config).double(), tokens()


@program("transformers", name="MambaForCausalLM and its loss (scans in float32)", grids=GRIDS, tolerance=1e-5)
def mamba():
    config = MambaConfig(vocab_size=30, hidden_size=16, state_size=4, num_hidden_layers=2, use_mambapy=False)
    return train, MambaForCausalLM(config).double(), tokens()


@program("transformers", name="LongformerModel", grids=GRIDS)
def longformer():
    config = LongformerConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        attention_window=4,
        max_position_embeddings=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def embed(model, ids):
        y = model(input_ids=ids).last_hidden_state
        y.square().mean().backward()
        return y

    return embed, LongformerModel(config).double(), tokens(length=16)


@program("transformers", name="LEDForConditionalGeneration and its loss", grids=GRIDS)
def led():
    config = LEDConfig(
        vocab_size=30,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        attention_window=4,
        max_encoder_position_embeddings=40,
        max_decoder_position_embeddings=40,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return train, LEDForConditionalGeneration(config).double(), tokens(length=16)
