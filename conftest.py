"""What holds for all tests."""

from __future__ import annotations

from signals import pytest_configure, pytest_unconfigure

__all__ = ["pytest_configure", "pytest_unconfigure"]
