"""Runs in an object store: an S3 server in this process, which the rank processes reach by HTTP."""

from __future__ import annotations

import functools
import gc
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.crash.test_promise_6_whole_or_not_there import build, learn, values
from tests.runs import save
from torch import nn

import anyrank
from anyrank.files import object_store
from anyrank.files.object_store import RemoteStorage
from anyrank.files.storage import storage_for
from anyrank.testing import Died, Fault, PeakMemory, run_ranks

NEWEST, BEFORE = "step-00000003", "step-00000002"
ALWAYS = [".metadata", "anyrank.json", "tensors.json"]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The server's address. One for all tests, as rank processes keep their connections."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of the test's own. The ranks have this process's environment."""
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{uuid.uuid4().hex}"
    files().mkdir(bucket)
    return f"s3://{bucket}/runs/a"


@functools.cache
def files() -> Any:
    """The file system, as another process sees it: nothing remembered, and not the library's."""
    from fsspec.core import url_to_fs

    return url_to_fs("s3://", use_listings_cache=False, skip_instance_cache=True)[0]


def objects(url: str, name: str = "") -> list[str]:
    """The objects of a run or of one of its steps, by their names in it."""
    root = f"{url.removeprefix('s3://')}/{name}".rstrip("/")
    return sorted(one.removeprefix(f"{root}/") for one in files().find(root))


def job_train(url: str, last: int, background: bool = False, verify: bool = False) -> Any:
    """Resume if there is something, and train until step `last`, each step saved."""
    net, optimizer = build()
    state = anyrank.TrainState(net, optimizer)
    options = {"every": 1, "background": background, "verify": verify}
    try:
        with anyrank.Checkpoints(url, state, keep=2, **options) as ckpts:
            report = ckpts.resume()
            for step in range(state.step, last):
                learn(net, optimizer, step)
                ckpts.step_done()
    except anyrank.RankError as error:
        return type(error).__name__  # another rank was killed
    return values(net), report, [one.step for one in ckpts.saved()]


def uninterrupted(last: int) -> list[list[float]]:
    """The parameters behind step `last`, on one rank."""
    net, optimizer = build()
    for step in range(last):
        learn(net, optimizer, step)
    return values(net)


def close(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 1)])
def test_a_run_goes_on(url: str, saved: int, resumed: int, background: bool) -> None:
    first = run_ranks(saved, job_train, url, 3, background)
    assert first[0][1] is None
    found, report, steps = run_ranks(resumed, job_train, url, 5, background)[0]
    assert (report.step, report.path) == (3, f"{url}/{NEWEST}")
    assert report.saved_on.ranks == saved
    assert close(found, uninterrupted(5))
    assert steps == [5, 4]


def test_retention_leaves_nothing_behind(url: str) -> None:
    run_ranks(2, job_train, url, 4)
    data = [f"__{rank}_0.{kind}" for rank in range(2) for kind in ("distcp", "json", "xxh3")]
    kept = [f"step-0000000{step}/{name}" for step in (3, 4) for name in (*ALWAYS, *data)]
    assert objects(url) == sorted([*kept, "latest"])
    assert files().cat(f"{url}/latest") == b"step-00000004\n"


@pytest.mark.parametrize(
    "fault",
    [Fault(1, "save.write", "kill", 3), Fault(0, "save.commit", "kill", 3)],
    ids=["before the data", "between data and manifest"],
)
def test_a_kill_before_the_manifest_leaves_no_checkpoint(url: str, fault: Fault) -> None:
    ends = run_ranks(2, job_train, url, 3, faults=[fault])
    assert isinstance(ends[fault.rank], Died)
    assert "__0_0.distcp" in objects(url, NEWEST)
    assert "anyrank.json" not in objects(url, NEWEST)
    found, report, steps = run_ranks(1, job_train, url, 3)[0]
    assert (report.step, report.set_aside) == (2, [])
    assert close(found, uninterrupted(3))
    assert steps == [3, 2]
    assert objects(url, NEWEST) == sorted(
        [*ALWAYS, "__0_0.distcp", "__0_0.json", "__0_0.xxh3"]
    )  # nothing of two ranks


def test_what_a_dead_save_of_another_step_left_is_cleaned(url: str) -> None:
    run_ranks(1, job_train, url, 2)
    files().pipe(f"{url}/step-00000009/__0_0.distcp", b"part of it")
    run_ranks(1, job_train, url, 3)
    assert objects(url, "step-00000009") == []


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest"])
def test_damage_is_set_aside_and_the_step_before_is_taken(url: str, harm: str) -> None:
    run_ranks(2, job_train, url, 3)
    name = "anyrank.json" if harm == "manifest" else "__1_0.distcp"
    path = f"{url}/{NEWEST}/{name}"
    data = bytearray(files().cat(path))
    if harm == "remove":
        files().rm(path)
    else:
        data[len(data) // 2] ^= 1
        files().pipe(path, bytes(data[:-100] if harm == "cut" else data))
    before = objects(url, NEWEST)
    verify = harm == "flip"
    _, report, steps = run_ranks(2, job_train, url, 2, False, verify)[0]
    assert (report.step, report.lost_steps) == (2, 1)
    assert report.set_aside == [f".aside-damaged-{NEWEST}"]
    assert objects(url, report.set_aside[0]) == before
    assert objects(url, NEWEST) == []
    assert steps == [2]


def test_a_run_that_did_not_resume_the_one_there_is_refused(url: str) -> None:
    with anyrank.Checkpoints(url, anyrank.TrainState(*build())) as ckpts:
        ckpts.save()
        other = anyrank.Checkpoints(url, anyrank.TrainState(*build()))
        with pytest.raises(anyrank.CheckpointError, match="contains step 0 of a different run"):
            other.save()
    assert ".lock" not in objects(url)


def test_what_fails_behind_the_commit_is_a_warning(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = RemoteStorage.create

    def refuse(self: RemoteStorage, path: str) -> Any:
        if path.endswith("latest"):
            raise OSError(28, "No space left on device")
        return create(self, path)

    monkeypatch.setattr(RemoteStorage, "create", refuse)
    with anyrank.Checkpoints(url, anyrank.TrainState(*build())) as ckpts:
        ckpts.save()
        assert [one.step for one in ckpts.saved()] == [0]
    assert "old steps could not be removed" in caplog.text


@pytest.mark.parametrize("which", ["the run", "a step"])
def test_the_weights_alone_are_loaded(url: str, which: str) -> None:
    run_ranks(2, job_train, url, 2)
    for last in (2, 3):  # the same process sees what was saved since
        run_ranks(1, job_train, url, last)
        net, _ = build()
        anyrank.load(net, url if which == "the run" else f"{url}/step-{last:08d}", verify=True)
        assert close(values(net), uninterrupted(last))


def test_data_is_sent_in_parts_and_never_held_whole(url: str) -> None:
    total, part = 64 << 20, 8 << 20
    # Of the 64 MiB; on a busy machine more parts wait for their answers than on a quiet one.
    assert run_ranks(1, job_peak, url, total, part)[0] < 5 * part
    data = f"{url}/step-00000000/__0_0.distcp"
    assert files().size(data) > total
    assert files().info(data)["ETag"].strip('"').endswith("-9")  # S3's mark of 9 parts


def job_peak(url: str, total: int, part: int) -> int:
    """How much memory a save takes, after one that loads what it needs."""
    object_store.PART_BYTES = part  # type: ignore[misc]
    save(f"{url}-small", anyrank.TrainState(nn.Linear(2, 2)))
    state = anyrank.TrainState(nn.Linear(1024, total // 4096, bias=False))
    with PeakMemory() as memory:
        save(url, state)
    return memory.peak_bytes


# -- the store by itself --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 100, 12 << 20], ids=["nothing", "little", "several parts"])
def test_what_is_abandoned_never_appears(
    url: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    store = storage_for(url)
    sink = store.create(f"{url}/file")
    sink.write([bytes(size)])
    sink.abandon()
    del sink
    gc.collect()
    assert store.names(url) == []
    assert not store.is_file(f"{url}/file")


def test_a_storage_that_does_not_answer_is_no_empty_folder(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import EndpointConnectionError

    run_ranks(1, job_train, url, 2)

    def refuse(*_: Any, **__: Any) -> Any:
        raise EndpointConnectionError(endpoint_url="http://nowhere")

    for method in ("info", "ls"):
        ckpts = anyrank.Checkpoints(url, anyrank.TrainState(*build()))
        store = ckpts._folder.store
        assert isinstance(store, RemoteStorage)
        with monkeypatch.context() as patch:
            patch.setattr(store.filesystem, method, refuse)
            with pytest.raises(anyrank.CheckpointError, match=r"cannot be read: .*Could not conn"):
                ckpts.resume()


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass a local path"):
        anyrank.Checkpoints(f"file://{tmp_path}", anyrank.TrainState(*build()))
