"""Triton's interpreter without what it does again and again for nothing, which is more than half of its time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import FunctionType

import pytest


@pytest.fixture(autouse=True, scope="session")
def _fast_interpreter():
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as context:
        _patch_the_language_once_in_a_launch(context, interpreter)
        _compute_no_unused_checks(context, interpreter)
        _remember_types(context, interpreter)
        yield


def _patch_the_language_once_in_a_launch(context, interpreter) -> None:
    """It replaces all of triton.language whenever a kernel calls a function, and takes it back after the launch."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    @functools.cache
    def languages(function: FunctionType) -> frozenset[str]:
        modules = [value.__name__ for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(name for name in modules if name.startswith("triton.language"))

    def patch_once(function):
        if languages(function) in patched:
            return None  # only a launch reads what comes back, and it begins with nothing patched
        patched.add(languages(function))
        return patch(function)

    def launch_with_nothing_patched(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    context.setattr(interpreter, "_patch_lang", patch_once)
    context.setattr(interpreter.GridExecutor, "__call__", launch_with_nothing_patched)


def _compute_no_unused_checks(context, interpreter) -> None:
    """It looks for overflows of integers, and drops what it has found unless it runs in its debug mode."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        context.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


def _remember_types(context, interpreter) -> None:
    """It builds its table of NumPy's types anew for each look-up."""
    look_up, found = interpreter._get_np_dtype, {}

    def remembered(dtype):
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    context.setattr(interpreter, "_get_np_dtype", remembered)
