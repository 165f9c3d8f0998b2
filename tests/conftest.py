"""What holds for every test."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _the_plugin_is_left_off():
    """A test that leaves it on would make another, in the same process, test something else."""
    yield
    override = sys.modules.get("torch_flashbackend.override")
    if override is not None and override._installed is not None:
        override._uninstall()
        pytest.fail("this test left the plugin switched on")
