"""Footprint: how many bytes of tensors a worker holds at once."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.environment.arguments import checks_arguments


class Footprint(TorchDispatchMode):
    """Counts the memory of all tensors that torch's operators meet on this worker's thread, while it is open.

    Each memory counts once, however many tensors view it, from the first operator that meets it until it is freed. Of
    workers that are threads of one process, each opens its own: memory counts for the one that meets it first, and not
    for others that read it as a message.

    >>> with Footprint() as footprint:
    ...     x = torch.zeros(1000, dtype=torch.float32)
    ...     y = (x + 1).sum()
    >>> footprint.peak
    8004

    Args:
        meta: whether tensors without memory are counted, on the device "meta", and no others.
    Attributes:
        peak: the most bytes that were held at once.
    """

    _owners: ClassVar[dict[int, tuple[StorageWeakRef, Footprint]]] = {}  # of all threads

    @checks_arguments
    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        self.peak = 0
        self._meta = meta
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._noted = 0  # bytes of those, also of those that have been freed since they were last looked at

    @property
    def now(self) -> int:
        """Bytes that are held now."""
        expired = torch.UntypedStorage._expired  # the references ask this function through two others
        freed = [key for key, (reference, _) in self._alive.items() if expired(reference.cdata)]
        for key in freed:
            self._noted -= self._alive.pop(key)[1]
        return self._noted

    def count(self, *tensors: torch.Tensor) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._note(tensor)
        self._look()

    def _look(self) -> None:
        if self._noted > self.peak:  # otherwise there is no new peak, whatever has been freed
            self.peak = max(self.peak, self.now)

    def _note_all(self, value: Any) -> None:
        """Note the tensors in what an operator takes or gives."""
        if isinstance(value, torch.Tensor):
            self._note(value)
        elif isinstance(value, (tuple, list, dict)):
            for one in value.values() if isinstance(value, dict) else value:
                self._note_all(one)

    def _note(self, value: torch.Tensor) -> None:
        # a wrapper tensor has no memory of its own
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or value.is_meta is not self._meta:
            return
        try:
            storage = value.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # a tensor without memory
        owner = self._owners.get(storage._cdata)
        if owner is None or owner[0].expired():
            known = self._alive.get(storage._cdata)
            self._noted += storage.nbytes() - (0 if known is None else known[1])
            reference = StorageWeakRef(storage)
            self._owners[storage._cdata] = (reference, self)
            self._alive[storage._cdata] = (reference, storage.nbytes())

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for key in self._alive:
            self._owners.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Python functions have been intercepted before; these are operators
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        self._note_all((args, kwargs, result))
        self._look()
        return result
