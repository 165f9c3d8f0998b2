"""tests/README.md says which test holds which promise: each exists, and no file of tests is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS / "README.md"
NAMED = re.compile(r"`(\w+)::([\w:]+)`")


def functions(path):
    """Names of a file's functions, those of classes as Class::function."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def missing(text):
    named = set(NAMED.findall(text))
    folders = (TESTS, TESTS / "gpu", TESTS / "interpreter")
    files = {path.stem: path for folder in folders for path in folder.glob("*.py")}
    known = {name: functions(files[name]) for name, _ in named if name in files}
    return sorted(f"{name}::{function}" for name, function in named if function not in known.get(name, ()))


def test_every_test_that_is_named_exists():
    text = PAGE.read_text()
    assert len(NAMED.findall(text)) > 150
    assert missing(text) == []


def test_a_test_that_is_gone_is_seen():
    gone = "`test_documentation::test_gone`, `test_gone::test_it`, `test_routing::RoutingTest::test_gone`"
    assert len(missing(gone + " `test_documentation::test_every_test_that_is_named_exists`")) == 3


def test_every_file_of_tests_is_named():
    named = {name for name, _ in NAMED.findall(PAGE.read_text())}
    assert {path.stem for path in TESTS.rglob("test_*.py")} - named == set()


def test_a_row_has_as_many_cells_as_its_table():
    for line in PAGE.read_text().splitlines():
        assert not line.startswith("|") or line.count("|") == 4, line
