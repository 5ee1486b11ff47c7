"""What a run tells its listeners, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import anyrank
from anyrank.runs.resume.listener import RunListener
from anyrank.runs.resume.listeners import Listeners
from anyrank.runs.resume.search import StepOfRun
from anyrank.runs.state.resume_report import ResumeReport


class Hearing(RunListener):
    """Notes what it hears."""

    def __init__(self, name: str, heard: list[Any]) -> None:
        self.name, self.heard = name, heard

    def on_resume(self, report: ResumeReport | None, step: StepOfRun | None) -> ResumeReport | None:
        self.heard.append((self.name, "resume", None if report is None else report.step))
        return report

    def tell(self, number: int) -> str:
        return f"{self.name} at {number}"

    def on_step(self, news: Any) -> None:
        self.heard.append((self.name, "step", news))

    def on_save(self) -> None:
        self.heard.append((self.name, "save"))

    def on_close(self, error: BaseException | None) -> None:
        self.heard.append((self.name, "close", type(error)))


def test_each_hears_of_a_run_in_order_and_of_its_own_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []

    def opened(*_: object) -> Listeners:
        return Listeners([Hearing("a", heard), Hearing("b", heard)])

    monkeypatch.setattr("anyrank.runs.resume.checkpoints.open_listeners", opened)
    state = anyrank.TrainState(nn.Linear(2, 1))

    def train() -> None:
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            ckpts.resume()
            ckpts.step_done()
            ckpts.save()
            raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        train()
    a = [event[1:] for event in heard if event[0] == "a"]
    assert a == [("resume", None), ("step", "a at 1"), ("save",), ("close", ValueError)]
    assert [event[0] for event in heard] == ["a", "b"] * 4
    heard.clear()
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.resume()
    assert heard[0] == ("a", "resume", 1)
    assert heard[-1] == ("b", "close", type(None))
