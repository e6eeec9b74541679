"""Trials of the fault lab, replayed once a session: their traces and reports."""

from pathlib import Path

import pytest
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.run.replay import replay, replay_joined
from kvcanary.replayer.run.settings import ReplaySettings


class Tried:
    """One trial: `traces` and `reports`, of a pair both sides', and what the lab says was done, `label`."""

    def __init__(self, fault: str, config: str, seed: int, folder: Path) -> None:
        outcome = run_trial(Trial(fault=FAULTS[fault], config=config, seed=seed), folder / "trace.arrow")
        self.label = outcome.label
        self.traces = list(outcome.traces)
        self.reports = [folder / f"{number}.report" for number in range(len(self.traces))]
        replay_all(self.traces, self.reports)


def replay_all(traces, reports):
    for report in reports:
        report.mkdir()
    if len(traces) == 1:
        replay(traces[0], settings=ReplaySettings(), report=reports[0])
    else:
        replay_joined(traces, settings=ReplaySettings(), reports=reports)


@pytest.fixture(scope="session")
def tried(tmp_path_factory):
    """Runs trials of the lab, each once."""
    made = {}

    def run(fault: str, config: str = "mha", seed: int = 1) -> Tried:
        key = fault, config, seed
        if key not in made:
            made[key] = Tried(*key, tmp_path_factory.mktemp(fault))
        return made[key]

    return run


@pytest.fixture
def tried_without_marks(tmp_path, monkeypatch):
    """Runs a trial whose engine leaves no mark in the trace."""

    def run(fault: str, config: str, seed: int) -> Tried:
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "mark", lambda *args, **kwargs: None)
            return Tried(fault, config, seed, tmp_path)

    return run
