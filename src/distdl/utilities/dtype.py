"""Published tables of dtypes: torch's, NumPy's scalar types, and the numbers that stand for them in messages."""

import torch

from distdl.tensors.dtypes import DTYPES, dtype_code

_IN_NUMPY = [dtype for dtype in DTYPES if not (dtype in (torch.bfloat16, torch.complex32) or "float8" in str(dtype))]

torch_to_numpy_dtype_dict = {dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype.type for dtype in _IN_NUMPY}
numpy_to_torch_dtype_dict = {scalar: dtype for dtype, scalar in torch_to_numpy_dtype_dict.items()}
torch_to_intID_dtype_dict = {dtype: dtype_code(dtype) for dtype in DTYPES}
intID_to_torch_dtype_dict = {code: dtype for dtype, code in torch_to_intID_dtype_dict.items()}
numpy_to_intID_dtype_dict = {scalar: dtype_code(dtype) for dtype, scalar in torch_to_numpy_dtype_dict.items()}
intID_to_numpy_dtype_dict = {code: scalar for scalar, code in numpy_to_intID_dtype_dict.items()}
