"""Record the traces in data/simulated/ from the simulated engine, clean and with a fault of the lab: `make traces`.

    python data/record_simulated.py [NAME ...] [-o FOLDER]

They show what the real engine of `record.py` does not have: K-only pools, a full-to-SWA table, EAGLE, overlap
scheduling, sweeps of the prefix cache, and pairs of a prefill and a decode engine.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, TrialRun, run_trial


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A trace, or the two of a pair: which fault (None: clean), which configuration, which seed."""

    fault: str | None = None
    config: str
    seed: int = 0

    @property
    def pair(self) -> bool:
        """Whether it is a folder with a prefill and a decode trace."""
        return self.config.startswith("pd")


SCENARIOS = {
    "clean_mla": Scenario(config="mla"),
    "clean_swa": Scenario(config="swa"),
    "clean_eagle": Scenario(config="eagle"),
    "clean_overlap": Scenario(config="overlap"),
    "clean_pd": Scenario(config="pd"),
    "clean_pd_swa": Scenario(config="pd_swa"),
    "mla_free_too_early": Scenario(fault="free_too_early", config="mla"),
    "swa_stale_mapping": Scenario(fault="stale_swa_mapping", config="swa"),
    "eagle_draft_position_plus_one": Scenario(fault="draft_position_plus_one", config="eagle"),
    "eagle_chunk_tail_predicted_token": Scenario(fault="chunk_tail_predicted_token", config="eagle"),
    "overlap_future_map_overrun": Scenario(fault="future_map_overrun", config="overlap"),
    "sweeps_kv_unused_cache": Scenario(fault="kv_unused_cache", config="sweeps"),
    "pd_kv_post_forward": Scenario(fault="kv_post_forward", config="pd"),
    "pd_transfer_wrong_stride": Scenario(fault="transfer_wrong_stride", config="pd"),
    "pd_abort_frees_during_transfer": Scenario(fault="abort_frees_during_transfer", config="pd"),
}


def record(name: str, folder: Path) -> TrialRun:
    """Record one scenario, its seed the first from the given one at which the fault has an effect."""
    scenario = SCENARIOS[name]
    target = folder / (name if scenario.pair else f"{name}.arrow")
    fault = FAULTS[scenario.fault] if scenario.fault else None
    for seed in range(scenario.seed, scenario.seed + 20):
        trial = Trial(fault=fault, config=scenario.config, seed=seed)
        outcome = run_trial(trial, target, overwrite=True)
        if fault is None or outcome.effect is not None:
            return outcome
    raise SystemExit(f"{name}: no effect at 20 seeds")


def main() -> None:
    """Record what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(SCENARIOS)}; all by default")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "simulated")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names or SCENARIOS:
        outcome = record(name, options.output)
        effect = "" if outcome.effect is None else f", wrong from forward {outcome.effect.forward} on"
        print(f"{name}: {outcome.forwards} forwards{effect}")


if __name__ == "__main__":
    main()
