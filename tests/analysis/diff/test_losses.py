"""What a trace lost is no difference: the comparison is inconclusive, unless what is left differs."""

import dataclasses

import pytest
from kvcanary.analysis.diff.compare import diff_traces
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.replayer.lab.configurations import CONFIGURATIONS

from ...support.places import DATA

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all

CONFIGS = ("mha", "eagle", "eagle_swa", "adapters", "recurrent", "layers", "told_reads")
FLUSH_BYTES = 20_000  # so that a trace has many batches


class Refusing:
    """A writer that refuses some events, as one with a full queue does: the recorder says which slots they wrote."""

    def __init__(self, writer, refused):
        self._writer, self._refused, self.calls = writer, refused, 0

    def __getattr__(self, name):
        return getattr(self._writer, name)

    def append(self, event):
        self.calls += 1
        return self.calls not in self._refused and self._writer.append(event)


def record(config, path, refused=()):
    configuration = CONFIGURATIONS[config]
    engine = dataclasses.replace(configuration.engine_config(3), noise=False)
    with SimulatedEngine(engine, configuration.requests(3), path, flush_bytes=FLUSH_BYTES) as running:
        outbox = running.recorder.outbox
        whole = outbox.writer
        outbox.writer = Refusing(whole, set(refused))
        running.run()
        outbox.writer = whole
    return path


def damaged(source, target, at):
    """Copy a trace with a stretch of zeros that begins at a part `at` of it."""
    data = bytearray(source.read_bytes())
    begin = int(len(data) * at)
    data[begin : begin + 400] = bytes(400)
    target.write_bytes(data)
    return target


def judged(a, b):
    """Compare two traces, either way round."""
    results = [diff_traces(a, b), diff_traces(b, a)]
    assert len({result.verdict for result in results}) == 1
    return results[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return {config: record(config, folder / f"{config}.arrow") for config in CONFIGS}


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ("mha", range(60, 70)),
        ("eagle", [508]),  # of a round of guesses
        ("eagle", range(178, 188)),
        ("eagle", range(414, 424)),  # what was accepted is not told
        ("eagle_swa", range(414, 424)),
        ("eagle_swa", [23, 24, 25]),
    ],
)
def test_events_that_the_recorder_dropped(config, refused, whole, tmp_path):
    result = judged(whole[config], record(config, tmp_path / "b.arrow", refused))
    assert result.verdict == "inconclusive", result.requests[:2]
    assert result.compared["tokens"] > 500


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("at", [0.15, 0.5, 0.8])
@pytest.mark.one_in(6)
def test_a_damaged_batch(config, at, whole, tmp_path):
    compare = judged if at == 0.5 else diff_traces
    result = compare(whole[config], damaged(whole[config], tmp_path / "b.arrow", at))
    assert result.verdict == "inconclusive", result.requests[:2]
    assert result.compared["tokens"] > 100


@pytest.mark.parametrize("name", ["clean_llama", "clean_fork_dedup_evict"])
@pytest.mark.parametrize("at", [0.15, 0.35, 0.55, 0.75])
def test_names_and_prompts_that_are_lost(name, at, tmp_path):
    source = DATA / f"{name}.arrow"
    compare = judged if at in (0.15, 0.55) else diff_traces
    result = compare(source, damaged(source, tmp_path / "b.arrow", at))
    assert result.verdict == "inconclusive", result.requests[:2]


def test_a_fault_beside_a_loss_is_found(tmp_path):
    broken = damaged(DATA / "table_swap.arrow", tmp_path / "b.arrow", 0.8)
    result = diff_traces(DATA / "clean_llama.arrow", broken)
    assert result.doubts
    assert (result.verdict, result.first.kind, result.first.request) == ("different", "table", "long")
