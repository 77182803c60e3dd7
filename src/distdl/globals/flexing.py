"""``flex_attention`` looks for global tensors: in torch it asks nobody.

torch compiles what it calls, which takes nothing that is split. It may have been imported by its name before distdl. So
it stays the function that it is, and gets other code.
"""

# mypy: disable-error-code="name-defined"

from __future__ import annotations

from typing import Any

from torch.nn.attention import flex_attention as flex
from torch.overrides import handle_torch_function

from distdl.globals.functions.flexible import torchs_flex_attention
from distdl.globals.replicas import Replica
from distdl.globals.table import copied
from distdl.globals.tensor import GlobalTensor
from distdl.nn.compiling import leave_uncompiled


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    for one in (*args[:3], kwargs.get("query"), kwargs.get("key"), kwargs.get("value")):
        if type(one) is GlobalTensor or type(one) is Replica:
            return _of_split(*args, **kwargs)
    return torchs_flex_attention(*args, **kwargs)


def _of_split(*args: Any, **kwargs: Any) -> Any:
    given = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
    return handle_torch_function(flex.flex_attention, given, *args, **kwargs)


leave_uncompiled(_of_split)


# (its code runs with the names of torch's module)
_ENTRIES: dict[Any, Any] = {
    _flex_attention: lambda *args, **kwargs: _distdl_flex_attention(*args, **kwargs),  # noqa: F821
}


def install() -> None:
    """Give torch's function the code that looks for global tensors."""
    for own, entry in _ENTRIES.items():
        name = own.__name__.removeprefix("_")
        function = getattr(flex, name)
        setattr(flex, f"_distdl_{name}", own)
        function.__wrapped__ = copied(function)
        function.__code__, function.__defaults__, function.__kwdefaults__ = entry.__code__, None, None
