# SPDX-License-Identifier: MIT
"""Markers of the Python tests. `-m "not slow"` is the quick set."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: minutes instead of seconds; CI runs it after the rest")
