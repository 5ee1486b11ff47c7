"""Ends the rank processes with the session."""

from __future__ import annotations

from anyrank.testing import close_pool


def pytest_unconfigure() -> None:
    close_pool()
