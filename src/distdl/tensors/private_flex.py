"""Private names of torch's flex attention. Only ``globals/extras/flex`` imports them, at the first use."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

# The score_mod of calls that give none.
unchanged_scores: Any = flex._identity

# The options of a kernel that follow from the arguments.
apply_kernel_options: Any = flex._apply_kernel_options

# A softmax that gives 0 where a query sees no key.
safe_softmax = torch._safe_softmax
