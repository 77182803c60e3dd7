"""Flex attention as torch computes it where nothing is compiled, for comparison."""

from torch._higher_order_ops.flex_attention import sdpa_dense

from distdl.globals.extras.flex.attention import torchs_flex_attention
from distdl.globals.tensor.table import composite

# what torch computes where nothing is compiled; it refuses gradients on CPUs
dense = composite(
    torchs_flex_attention,
    flex_attention_hop=sdpa_dense,
    _validate_device=lambda *_: None,
    _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,
)
