"""A plugin for SGLang that writes down what its online canary finds, step by step, in the scheduler's process.

One line a step and canary (an EAGLE draft has one of its own, in a second file): the step, the new rows of its ring,
and how many slots each launch tag has looked at.
"""

import json
import os
import sys


def plugin():
    path = os.environ.get("CONFORMANCE_RING")
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    stand_in_for_missing_backends()
    if path:
        note_violations(path)


def stand_in_for_missing_backends():
    """EAGLE's worker names attention backends whose packages may be missing, to compare types; none is used here."""
    import importlib
    import types

    import sglang.srt.layers.attention as package

    for module, name in (
        ("dsa_backend", "DeepseekSparseAttnBackend"),
        ("deepseek_v4_backend", "DeepseekV4AttnBackend"),
        ("flashmla_backend", "FlashMLABackend"),
    ):
        full = f"{package.__name__}.{module}"
        try:
            importlib.import_module(full)
        except Exception as error:  # noqa: BLE001  # whatever it lacks
            print(f"conformance: {full} is stood in for: {type(error).__name__}: {error}", flush=True)
            stand_in = types.ModuleType(full)
            setattr(stand_in, name, type(name, (), {}))
            sys.modules[full] = stand_in
            setattr(package, module, stand_in)


def note_violations(path):
    from sglang.srt.kv_canary.runner.violation_manager import ViolationManager

    step, managers, seen = ViolationManager.step, [], {}

    def noting_step(self):
        if self not in managers:
            managers.append(self)
        number = managers.index(self)
        log = self._device_state.violation_log
        end = int(log.violation_write_index.item())
        line = {
            "step": self._outer_step_counter_getter() - 1,
            "rows": log.violation_ring[seen.get(number, 0) : end].tolist(),
            "counters": self._device_state.slot_run_counters.tolist(),
        }
        seen[number] = end
        with open(path + (str(number) if number else ""), "a") as file:  # noqa: PTH123
            file.write(json.dumps(line) + "\n")
        step(self)

    ViolationManager.step = noting_step
