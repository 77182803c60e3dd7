"""Every change that distdl makes to torch: why it is made, and the test that fails without it.

torch offers ``__torch_function__`` to those who define tensors. Where a function does not ask for it, and tensors of
ours may come there, torch's function is replaced. What replaces it stands in the room whose idea it is; here it is put
in the place of torch's. With plain tensors alone, each calls torch's own, which stays reachable (``original_of``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from importlib import import_module
from inspect import signature
from pkgutil import resolve_name
from threading import RLock
from typing import Any, NamedTuple

import torch

from distdl.backends import before_threads
from distdl.environment.importing import behind
from distdl.globals.functions import values
from distdl.globals.gradients import own_functions, recomputing
from distdl.globals.layouts.context import worlds
from distdl.globals.tensor.table import ORIGINAL, copied, is_lent, original_of
from distdl.tensors import caching
from distdl.workers.worlds import launched

Replacement = Callable[[Any], Any]

AT_IMPORT, WITH_THREADS = "import distdl", "workers that are threads"
FLEX = "torch.nn.attention.flex_attention"


class Patch(NamedTuple):
    """One change of torch.

    Attributes:
        holder: the module or class of torch, by its path.
        name: of its attribute that is replaced.
        replacement: takes torch's own and returns what replaces it.
        reason: what goes wrong without it.
        test: a test that fails without it, as ``path::name``.
        when: what installs it: ``import distdl``, the import of a module of torch, or the first world of threads.
        by_code: whether the function stays the same object and gets other code, as programs may have imported it by its
            name before distdl.
    """

    holder: str
    name: str
    replacement: Replacement
    reason: str
    test: str
    when: str = AT_IMPORT
    by_code: bool = False


def _extra(room: str, name: str) -> Replacement:
    """A replacement that calls a function of ``extras``, which is imported at the first call that may need it.

    That function takes torch's own in front of its arguments.
    """
    find = cache(lambda: getattr(import_module(f"distdl.globals.extras.{room}"), name))

    def replacement(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or not (worlds.ever or launched() == "threads"):
                return original(*args, **kwargs)
            return find()(original, *args, **kwargs)

        return run

    return replacement


def _flex(name: str) -> Replacement:
    """A replacement that calls a function of ``extras.flex``, which is imported behind torch's module."""

    def replacement(original: Any) -> Any:
        own = getattr(import_module("distdl.globals.extras.flex.lending"), name)

        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return own(original, *args, **kwargs)

        return run

    return replacement


def _generator(name: str) -> Replacement:
    return lambda original: getattr(import_module("distdl.backends.threaded.generator"), name)(original)


_TESTS = "tests/globals"
_EAGER = "torch._functorch.eager_transforms"
_TRANSFORM = _extra("transforms", "transformed")
_UNASKED = "transforms ask no __torch_function__, and wrap tensors; a wrapper has no memory that could travel"
_SHARED = "torch keeps it for all threads of the process: a worker that is a thread would meet what another has set"

PATCHES = [
    Patch(
        "torch.autograd.Function",
        "apply",
        own_functions.apply_of,
        "a user's autograd function asks no __torch_function__, and would see tensors without memory",
        f"{_TESTS}/gradients/test_whole_functions.py::test_an_autograd_function_in_a_model",
    ),
    Patch(
        "torch.utils.checkpoint",
        "_CheckpointFrame",
        recomputing.frame_of,
        "a backward that recomputes a forward would not know that this is a model's, or on blocks, nor what it drew",
        f"{_TESTS}/blocks/test_local_map.py::test_second_derivatives_of_blocks_beside_weights",
    ),
    Patch(
        "torch.testing._comparison.TensorLikePair",
        "_to_tensor",
        values.to_tensor_of,
        "torch.testing.assert_close reads attributes and cells one by one, and would say where a block differs",
        f"{_TESTS}/functions/test_pointwise.py::test_assert_close",
    ),
    Patch(
        _EAGER,
        "grad_and_value_impl",
        _TRANSFORM,
        _UNASKED,
        f"{_TESTS}/extras/test_transforms.py::test_derivatives",
    ),
    Patch(
        _EAGER,
        "_vjp_with_argnums",
        _TRANSFORM,
        _UNASKED,
        f"{_TESTS}/extras/test_transforms.py::test_jacobians",
    ),
    Patch(
        _EAGER,
        "_jvp_with_argnums",
        _TRANSFORM,
        _UNASKED,
        f"{_TESTS}/extras/test_mapping.py::test_forward_mode_inside_of_vmap_on_threads",
    ),
    Patch(
        _EAGER,
        "linearize",
        _extra("linearizing", "linearized"),
        "it traces the function, and asks no __torch_function__: global tensors cannot be traced",
        f"{_TESTS}/extras/test_linearizing.py::test_values",
        by_code=True,
    ),
    Patch(
        "torch._functorch.vmap",
        "_flat_vmap",
        _extra("mapping", "flat_vmap"),
        "vmap asks no __torch_function__: samples of what is split are mapped on blocks, or one by one",
        f"{_TESTS}/extras/test_mapping.py::test_samples",
    ),
    Patch(
        "torch._higher_order_ops.utils",
        "_hop_compile_and_call",
        _extra("control_flow", "called"),
        "torch.cond, while_loop, scan and map compile their functions: messages cannot be traced",
        f"{_TESTS}/extras/test_control_flow.py::test_branches",
    ),
    Patch(
        FLEX,
        "flex_attention",
        _flex("flex_attention"),
        "flex_attention asks no __torch_function__, and compiles what it calls",
        f"{_TESTS}/extras/flex/test_attention.py::test_functions_of_scores",
        FLEX,
        by_code=True,
    ),
    Patch(
        FLEX,
        "create_mask",
        _flex("create_mask"),
        "it maps a function of elements by vmap, which may have captured tensors that are split",
        f"{_TESTS}/extras/flex/test_attention.py::test_masks_of_documents_that_are_split",
        FLEX,
        by_code=True,
    ),
    Patch(
        FLEX,
        "create_block_mask",
        _flex("create_block_mask"),
        "with _compile=True, as transformers calls it, it compiles a function that may have captured what is split",
        f"{_TESTS}/extras/flex/test_attention.py::test_masks_of_documents_that_are_split",
        FLEX,
        by_code=True,
    ),
    Patch(
        FLEX,
        "_dense_to_ordered",
        _flex("dense_to_ordered"),
        "torch notes in one dict for all threads that it sorts, and fails where two workers do",
        f"{_TESTS}/extras/flex/test_attention.py::test_workers_take_turns_where_torch_makes_a_mask",
        FLEX,
    ),
    Patch(
        "torch.nn.utils.parametrize",
        "_cache",
        caching.cache_of,
        _SHARED,
        f"{_TESTS}/models/test_additions.py::test_parametrisations_are_cached_for_each_thread",
        WITH_THREADS,
    ),
    Patch(
        "torch.nn.utils.parametrize",
        "_cache_enabled",
        caching.depth_of,
        _SHARED,
        f"{_TESTS}/models/test_additions.py::test_parametrisations_are_cached_for_each_thread",
        WITH_THREADS,
    ),
]
if sys.version_info < (3, 12):
    PATCHES += [
        Patch(
            "torch.random",
            name,
            _generator(function),
            "a thread that waits for the generator within a garbage collection of another one keeps the interpreter",
            "tests/backends/test_exits.py::"
            "test_the_functions_of_torchs_generator_wait_for_each_other_and_a_signal_may_call_them_within_a_call",
            WITH_THREADS,
        )
        for name, function in (("default_generator", "shared"), ("__class__", "module_of"))
    ]

_turn = RLock()
_installed: set[tuple[str, str]] = set()


def install(when: str = AT_IMPORT) -> None:
    """Change torch, as far as that is to be done now. What has been done is not done again.

    A second import of distdl replaces what the first has put there, and calls torch's own.
    """
    with _turn:
        for patch in PATCHES:
            if patch.when == when and patch[:2] not in _installed and _put(patch):
                _installed.add(patch[:2])


def arrange() -> None:
    """Make the changes of ``import distdl`` now; let the others follow at their moments, as ``Patch.when`` says."""
    install()
    behind(FLEX, partial(install, FLEX))
    before_threads.append(partial(install, WITH_THREADS))


def standing(patch: Patch) -> Any:
    """What stands now in the place of a patch, as the holder keeps it: a class method as such."""
    holder = resolve_name(patch.holder)
    return vars(holder)[patch.name] if patch.name in vars(holder) else getattr(holder, patch.name)


def _put(patch: Patch) -> bool:
    """Put a replacement in the place of what torch has; returns whether there is one."""
    if patch.by_code:
        _lend(standing(patch), patch.replacement)
        return True
    original = original_of(standing(patch))
    made = patch.replacement(original)
    if made is not original:
        setattr(made, ORIGINAL, original)
        setattr(resolve_name(patch.holder), patch.name, made)
    return made is not original


def _lend(function: Any, replacement: Replacement) -> None:
    """Let a Python function of torch run ours, also for programs that have imported it by its name before.

    Its module gets ours under a new name, and its code becomes a call of that name.
    """
    name = f"_distdl_{function.__name__}"
    function.__globals__[name] = replacement(copied(function))
    if is_lent(function):
        return
    function.__signature__ = signature(function)
    function.__wrapped__ = copied(function)
    code = _entry.__code__.replace(co_names=(name,), co_name=function.__name__)
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, None, None


def _entry(*args: Any, **kwargs: Any) -> Any:
    """Its code is what a function gets, with the names of that function's module."""
    return _distdl(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
