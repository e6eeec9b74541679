"""Overlap scheduling: the host hears of tokens late, and a request that has finished runs once more."""

import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.runner import FutureMap
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.reader import read_trace

from ...support.engines.simulated_engines import assert_clean, judge

WORKLOAD = RandomWorkload(requests=25, prompt_tokens=40, output_tokens=20, max_tokens=200, arrival_rate=300.0)


def record(path, **changes):
    config = EngineConfig(**{"page_size": 4, "num_pages": 300, "overlap": True, **changes})
    with SimulatedEngine(config, WORKLOAD, path) as engine:
        engine.run()
    return engine


@pytest.mark.parametrize("changes", [{}, {"mixed": True}, {"shape": "swa", "window": 16}, {"num_pages": 60}], ids=str)
def test_clean(changes, tmp_path):
    engine = record(tmp_path / "trace.arrow", **changes)
    assert engine.counters.overruns > 5
    assert engine.counters.finished == engine.counters.requests
    assert_clean(tmp_path / "trace.arrow", engine)


def test_tokens_come_after_the_next_launch_and_truth_does_not_know_them(tmp_path):
    engine = record(tmp_path / "trace.arrow")
    waiting, late, asked = [], 0, {}
    for view in read_trace(tmp_path / "trace.arrow"):
        if view.kind == "forward" and view.ints("request_ids").size:
            assert not view.ints("sampled_tokens").size
            number = view.scalar("forward")
            waiting.append(number)
            assert len(waiting) <= 2
            if view.scalar("mode") == "decode":
                columns = [view.ints(name).tolist() for name in ("request_ids", "prefix_lens", "truth_lens")]
                for request, prefix, known in zip(*columns, strict=True):
                    if request >= 0 and known:
                        # The host knows the input token, or it is still on the device.
                        assert known in (prefix, prefix + 1)
                        asked[known - prefix] = asked.get(known - prefix, 0) + 1
        if view.kind == "sample":
            late += len(waiting) == 2
            assert view.scalar("forward") == waiting.pop(0)
            assert view.ints("sampled_tokens").size == view.ints("sampled_lens").sum()
    assert not waiting
    assert late > 20
    assert asked[0] > asked[1] > 0
    assert engine.in_flight.__len__() == 0


def test_overlap_changes_no_answer(tmp_path):
    answers = []
    for overlap in (False, True):
        finished = {}
        config = EngineConfig(page_size=4, num_pages=300, overlap=overlap)
        with SimulatedEngine(config, WORKLOAD, tmp_path / f"{overlap}.arrow") as engine:
            finish = engine.scheduler.finish

            def note(request, finish=finish, finished=finished):
                finished[request.request_id] = request.known_tokens.tolist()
                finish(request)

            engine.scheduler.finish = note
            engine.run()
        answers.append(finished)
    assert len(answers[0]) == 25
    assert answers[0] == answers[1]


def test_a_ring_that_is_too_small_is_seen(tmp_path):
    path = tmp_path / "trace.arrow"
    config = EngineConfig(page_size=4, num_pages=300, overlap=True)
    with SimulatedEngine(config, WORKLOAD, path) as engine:
        engine.futures = FutureMap(3)
        engine.run()
    summary = judge(path)
    assert summary.verdict.value == "corrupt"
    assert summary.findings or summary.violations
