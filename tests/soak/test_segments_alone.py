"""Every configuration of the fault lab, clean and with some of its faults: segments alone give what all give together,
and so do segments shared out among workers.
"""

import random
from pathlib import Path

import pytest
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial

from ..support.raw_traces import cut
from ..support.segment_runs import check, compared

SEED = 3
FAULTS_EACH = 6


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_alone_and_together(config: str, tmp_path: Path) -> None:
    possible = [fault for fault in FAULTS.values() if config in fault.configs]
    random.Random(f"{SEED} {config}").shuffle(possible)
    segments = traces = 0
    for fault in [None, *possible[:FAULTS_EACH]]:
        folder = tmp_path / (fault.name if fault else "clean")
        folder.mkdir()
        pair = CONFIGURATIONS[config].pair is not None
        outcome = run_trial(Trial(fault=fault, config=config, seed=SEED), folder if pair else folder / "t.arrow")
        for trace in outcome.traces:
            parts = cut(trace, folder / f"{trace.stem}-cut.arrow", seed=SEED, least=20, most=120)
            check(trace, parts, folder / f"{trace.stem}-out")
            if not pair:
                (folder / "shared").mkdir()
                compared(parts, folder / "shared", workers=4)
            segments, traces = segments + len(parts), traces + 1
    print(f"{config}: {traces} traces in {segments} segments")
