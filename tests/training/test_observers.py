"""Observers: when they are called, what they may ask for, and what survives a resume."""

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from runs import TINY, assert_bitwise, compose, newest_checkpoint, read_summary, records

from ddp_trainer import Observer, ObserverConfig, TrainingRun, register_observer
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.run import ObserverError
from ddp_trainer.training.state import check_observer_state
from ddp_trainer.training_run import run


@dataclass(kw_only=True, slots=True)
class RecorderConfig(ObserverConfig):
    name: str = "recorder"
    stop_at: int | None = None
    """The step after which rank 1 asks to stop."""
    reason: str = "enough"
    signals: bool = False
    """Whether rank 1 also sends itself SIGTERM then."""
    save_at: int | None = None
    """The step after which rank 1 asks to save."""
    fail_at: int | None = None
    """The step after which rank 0 fails."""


class Recorder(Observer):
    """Writes each event of each rank to a file, and asks for what its config says."""

    def __init__(self, config: RecorderConfig) -> None:
        self.config = config
        self.steps = 0

    def note(self, run: TrainingRun, event: str, **values: Any) -> None:
        with (run.run_dir / f"events-{run.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "step": run.step, **values}) + "\n")

    def on_start(self, run: TrainingRun) -> None:
        self.note(run, "start", steps=self.steps)

    def on_epoch(self, run: TrainingRun) -> None:
        self.note(run, "epoch", epoch=run.epoch)

    def on_phase(self, run: TrainingRun, phase: Phase) -> None:
        assert isinstance(phase, Phase)

    def on_step(self, run: TrainingRun) -> None:
        assert run.batch is not None
        self.steps += 1
        self.note(run, "step")
        if run.world.rank == run.world.world_size - 1:
            if run.step == self.config.stop_at:
                run.request_stop(self.config.reason)
                if self.config.signals:
                    os.kill(os.getpid(), signal.SIGTERM)
            if run.step == self.config.save_at:
                run.request_save()
        if run.world.is_main and run.step == self.config.fail_at:
            raise ValueError("on purpose")

    def rank_values(self, run: TrainingRun) -> list[float]:
        return [run.world.rank, 10.0 * run.step]

    def on_log(self, run: TrainingRun) -> None:
        run.log({"own/steps": self.steps})
        self.note(run, "log", gathered=run.gathered(self).tolist(), tags=sorted(run.values))

    def on_evaluation(self, run: TrainingRun) -> None:
        self.note(run, "evaluation", top1=run.evaluation.top1, logged=run.values["eval/top1"])

    def on_save(self, run: TrainingRun) -> None:
        self.note(run, "save")

    def on_failure(self, run: TrainingRun) -> None:
        self.note(run, "failure")

    def on_end(self, run: TrainingRun) -> None:
        self.note(run, "end", has_summary=(run.run_dir / "summary.json").exists())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def train_with(recorder: RecorderConfig, words: list[str]) -> str:
    register_observer("recorder", RecorderConfig, Recorder)
    config = compose(*TINY, "log_every_steps=4", *words)
    try:
        return run(replace(config, observer={"recorder": recorder})).status
    except ObserverError as error:
        return str(error)


def events_of(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    lines = (run_dir / f"events-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_event_comes_on_each_rank_at_its_time(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "name=run"]
    assert on_ranks(2, train_with, RecorderConfig(), words) == ["finished"] * 2
    first, second = (events_of(tmp_path / "run", rank) for rank in (0, 1))
    names = [(event["event"], event["step"]) for event in first]
    assert names == [(event["event"], event["step"]) for event in second]
    epoch = [("log", 4), ("log", 8), ("evaluation", 8), ("save", 8)]
    expected = [("start", 0), ("epoch", 0)]
    for step in range(1, 9):
        expected += [("step", step), *[event for event in epoch if event == ("log", step)]]
    expected += epoch[2:]
    assert names[: len(expected)] == expected
    assert names[-1] == ("end", 16)
    assert first[-1]["has_summary"]
    logs = [event for event in first if event["event"] == "log"]
    assert [log["gathered"] for log in logs[:2]] == [[[0, 40], [1, 40]], [[0, 80], [1, 80]]]
    assert all({"own/steps", "train/loss", "time/step_ms"} <= set(log["tags"]) for log in logs)
    assert [record["own/steps"] for record in records(tmp_path / "run", "own/steps")] == [
        4,
        8,
        12,
        16,
    ]
    for event in first:
        if event["event"] == "evaluation":
            assert event["top1"] == event["logged"]


def test_a_request_of_one_rank_stops_all_and_the_reason_is_recorded(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "name=run"]
    recorder = RecorderConfig(stop_at=5, save_at=3)
    assert on_ranks(3, train_with, recorder, words) == ["stopped_early"] * 3
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["stop_reason"]) == ("stopped_early", "enough")
    assert summary["steps"] == newest_checkpoint(tmp_path / "run")["step"]
    # A control point comes about once a second, or at a log point.
    assert 5 <= summary["steps"] <= 8
    names = [(event["event"], event["step"]) for event in events_of(tmp_path / "run", 1)]
    assert any(name == "save" and 3 <= step <= 4 for name, step in names)
    assert ("evaluation", summary["steps"]) in names

    assert on_ranks(3, train_with, recorder, words) == ["stopped_early"] * 3
    assert read_summary(tmp_path / "run") == summary  # nothing is left to train

    # Another config of the observer may let the training go on.
    assert on_ranks(3, train_with, RecorderConfig(), words) == ["finished"] * 3
    assert read_summary(tmp_path / "run")["steps"] == 16


def test_a_request_counts_also_if_a_signal_comes_in_the_same_step(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "name=run", "log_every_steps=1"]
    recorder = RecorderConfig(stop_at=5, signals=True)
    assert on_ranks(2, train_with, recorder, words) == ["stopped_early"] * 2
    summary = read_summary(tmp_path / "run")
    assert (summary["stop_reason"], summary["steps"]) == ("enough", 5)
    assert ("evaluation", 5) in [(e["event"], e["step"]) for e in events_of(tmp_path / "run", 1)]


def test_an_empty_reason_stops_too(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "name=run"]
    recorder = RecorderConfig(stop_at=5, reason="")
    assert on_ranks(1, train_with, recorder, words) == ["stopped_early"]
    assert read_summary(tmp_path / "run")["stop_reason"] == ""


def test_state_survives_a_resume_and_observers_do_not_change_the_training(tmp_path: Path) -> None:
    for name, launches in (("whole", [()]), ("parts", [("max_steps=5",), ()])):
        for launch in launches:
            words = [f"output_dir={tmp_path}", f"name={name}", *launch]
            on_ranks(2, train_with, RecorderConfig(), words)
    starts = [e for e in events_of(tmp_path / "parts", 0) if e["event"] == "start"]
    assert [(event["step"], event["steps"]) for event in starts] == [(0, 0), (5, 5)]
    one, other = (newest_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one["observers"]["recorder"] == other["observers"]["recorder"] == {"steps": 16}
    assert_bitwise(one["model"], other["model"])
    assert_bitwise(one["optimizer"], other["optimizer"])


@pytest.mark.parametrize("ranks", [1])
def test_an_exception_names_the_observer_and_the_event(ranks: int, tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "name=run"]
    [text] = on_ranks(ranks, train_with, RecorderConfig(fail_at=2), words)
    assert text == "observer=recorder failed in on_step (ValueError: on purpose)"
    assert events_of(tmp_path / "run", 0)[-1] == {"event": "failure", "step": 2}
    assert "test_observers.py" in (tmp_path / "run/failure.log").read_text()


@pytest.mark.parametrize("state", [{"at": Path("x")}, {"done": {1, lambda: 1}}, [object()]])
def test_a_state_that_a_checkpoint_could_not_give_back_is_refused(state: Any) -> None:
    with pytest.raises(ObserverError, match="observer=mine: state_dict must return builtins"):
        check_observer_state("mine", state)


def test_builtins_and_tensors_are_a_state() -> None:
    check_observer_state("mine", {"a": [1, 2.5, None, True], 3: (torch.ones(2), b"x"), "s": "é"})
