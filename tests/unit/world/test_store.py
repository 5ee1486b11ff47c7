"""Each call of the job's store has a deadline, which ANYRANK_TIMEOUT_SEC raises."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from anyrank.settings import TIMEOUT_SEC
from anyrank.world import store as stores
from anyrank.world.store import Store, StoreLost


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store from which an answer is expected within 0.2 s."""
    monkeypatch.setattr(stores, "ANSWER_SEC", 0.2)
    return Store(dist.HashStore(), "test")  # pyright: ignore[reportPrivateImportUsage]


def slow(_: Any) -> str:
    time.sleep(0.8)
    return "answer"


def test_a_store_that_does_not_answer_counts_as_lost(store: Store) -> None:
    with pytest.raises(StoreLost, match="failed: no answer for 0 s"):
        store.call(slow)
    with pytest.raises(StoreLost, match="does not answer"):
        store.get("key")


def test_ranks_that_may_wait_longer_also_wait_longer_for_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT_SEC.name, str(10 * TIMEOUT_SEC.default))
    assert store.call(slow) == "answer"


def test_a_short_limit_of_waits_leaves_the_store_its_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT_SEC.name, "1")
    store.set("key", "value")
    assert store.get("key") == "value"
