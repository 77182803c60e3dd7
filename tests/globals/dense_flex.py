"""Flex attention as torch computes it where nothing is compiled, for comparison."""

from same import noise
from torch._higher_order_ops.flex_attention import sdpa_dense
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import distdl
from distdl.globals.extras.flex.attention import torchs_flex_attention
from distdl.globals.tensor.table import composite

# what torch computes where nothing is compiled; it refuses gradients on CPUs
dense = composite(
    torchs_flex_attention,
    flex_attention_hop=sdpa_dense,
    _validate_device=lambda *_: None,
    _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,
)

# (torch warns once in a process; here a warning is an error)
flex._WARNINGS_SHOWN.update(("flex_attention_performance", "deprecated_return_lse"))
q, k, v = noise(2, 3, 5, 4), noise(2, 3, 7, 4, seed=1), noise(2, 3, 7, 6, seed=2)


def attend(query, key, value, *args, **kwargs):
    split = any(isinstance(one, distdl.GlobalTensor) for one in (query, key, value))
    return (flex_attention if split else dense)(query, key, value, *args, **kwargs)


def mask(function, batch=None, heads=None, queries=5, keys=7):
    return create_block_mask(function, batch, heads, queries, keys, device="cpu", BLOCK_SIZE=2)
