"""What one module uses of another exists, and is called with the arguments that it takes.

No run without a GPU reaches most lines of the kernels' launchers, their tuners and the GPU suite. So what they name is
looked up here: attributes of modules of this repository, and the arguments of calls to its functions and classes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "kernels", "torch_flashbackend", "tests/gpu")


def package_of(path):
    """What a relative import in a file is relative to; None where there are none."""
    parts = path.relative_to(ROOT).parent.parts
    if parts[0] == "kernels":
        return ".".join(("torch_flashbackend", *parts))
    return ".".join(parts) if parts[0] == "torch_flashbackend" else None


def is_ours(name):
    return name.partition(".")[0] in ("benchmarks", "common", "torch_flashbackend")


def imported(tree, package):
    """(name, what it stands for, line) of each import from a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or is_ours(node.module)):
            source = importlib.import_module("." * node.level + (node.module or ""), package)
            for alias in node.names:
                if not hasattr(source, alias.name):
                    importlib.import_module(f"{source.__name__}.{alias.name}")
                yield alias.asname or alias.name, getattr(source, alias.name), node.lineno


def names_of_ours(tree, package):
    """What each name stands for wherever it stands in the file: without those of more than one thing."""
    found, others = {}, set()
    for name, meant, _ in imported(tree, package):
        if found.setdefault(name, meant) is not meant:
            others.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            others.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            others.add(node.id)
    return {name: meant for name, meant in found.items() if name not in others}


def meaning(node, names):
    """Of `name` or `module.name`; None of anything else, and a message for what a module does not have."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = names.get(node.value.id)
        if isinstance(module, types.ModuleType):
            return getattr(module, node.attr, f"{module.__name__} has no {node.attr}")
    return None


def mistakes(text, package):
    """A line for each attribute that is missing and each call that does not fit."""
    tree = ast.parse(text)
    names = names_of_ours(tree, package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            meant = meaning(node, names)
            if isinstance(meant, str) and meant.endswith(f" has no {node.attr}"):
                yield f"line {node.lineno}: {meant}"
        if not isinstance(node, ast.Call) or any(keyword.arg is None for keyword in node.keywords):
            continue
        meant = meaning(node.func, names)
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            continue
        if isinstance(meant, types.FunctionType) or inspect.isclass(meant):
            try:
                signature = inspect.signature(meant)
            except ValueError:  # of a class that is written in C, a ctypes one say
                continue
            try:
                signature.bind(*node.args, **{keyword.arg: None for keyword in node.keywords})
            except TypeError as error:
                yield f"line {node.lineno}: {ast.unparse(node.func)}: {error}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_use_what_others_have(folder, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT))
    found, files = [], sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in files:
            found += [f"{path.relative_to(ROOT)} {what}" for what in mistakes(path.read_text(), package_of(path))]
    assert not found, "\n".join(found)


def test_a_mistake_is_seen():
    text = """
from torch_flashbackend import driver
from torch_flashbackend.kernels.cuda import tiles
driver.max_active_clusters(function, config)
driver.max_active_clusters(function, config, 2)
driver.max_active_clusters(function, config, blocks=2)
tiles.BackwardTile(64, 128, 16, pairs=True)
print(driver.gone)
"""
    assert sorted(mistakes(text, None)) == [
        "line 4: driver.max_active_clusters: missing a required argument: 'blocks'",
        "line 7: tiles.BackwardTile: got an unexpected keyword argument 'pairs'",
        "line 8: torch_flashbackend.driver has no gone",
    ]
    # A name that may be something else is left alone.
    assert not list(mistakes(f"{text}def function(driver, tiles): pass", None))
