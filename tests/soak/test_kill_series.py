"""200 engines killed with SIGKILL at random moments, in turn with one file, with segments, and as a flight recorder.

The last flush before a kill may be as old as the flush interval, the write under way (of a keyframe, perhaps) and what
the machine takes to run the writer's thread at all, for which a second is allowed.
"""

from pathlib import Path

from ..support.killed.kill_series import FLUSH_NS, OPTIONS, Victims

KILLS = 200
SLACK_NS = 1_000_000_000


def test_nothing_that_was_flushed_is_lost(tmp_path: Path) -> None:
    done = []
    modes = list(OPTIONS)
    with Victims() as victims:
        for number in range(KILLS):
            folder = tmp_path / str(number)
            folder.mkdir()
            killed = victims.kill_one(folder, mode=modes[number % len(modes)], seed=number)
            assert killed.age_ns <= FLUSH_NS + 2 * killed.longest_write_ns + SLACK_NS, killed
            done.append(killed)
    ages = sorted(killed.age_ns for killed in done)
    print(
        f"{KILLS} kills; {sum(k.batches for k in done):,} flushed batches, {sum(k.events for k in done):,} events; the last "
        f"flush was {ages[KILLS // 2] / 1e6:.0f} ms old in the median, {ages[-1] / 1e6:.0f} ms at most; the longest write "
        f"took {max(k.longest_write_ns for k in done) / 1e6:.0f} ms"
    )
