"""The probe knows what forwards and sweeps read, and sees whatever is not as it must be."""

import dataclasses

import numpy as np
import pytest
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.effect import Clock, Probe, around


def flip_byte(engine, request, slot):
    engine.memory.pools[0].stream_bytes(1)[slot, 9] ^= 0x10


def change_content(engine, request, slot):
    engine.memory.pools[0].content[slot] += np.uint64(1)


def move_entry(engine, request, slot):
    table = engine.memory.req_to_token
    table[request.row, request.cached_len - 1] = table[request.row, request.cached_len - 2]


def swap_input(engine, request, slot):
    @around(engine.builder)
    def build(original, mode, requests, **kwargs):
        batch = original(mode, requests, **kwargs)
        if request in requests:
            batch.input_ids[: batch.num_tokens] ^= 1
        return batch


def shift_positions(engine, request, slot):
    around(engine.builder, "positions")(lambda original, *args: original(*args) + 1)


def shorten_prefix(engine, request, slot):
    @around(engine.builder)
    def build(original, mode, requests, **kwargs):
        kwargs["prefix_lens"] = [prefix - 1 for prefix in kwargs["prefix_lens"]]
        return original(mode, requests, **kwargs)


DAMAGE = {
    "bytes": flip_byte,
    "content": change_content,
    "content of another": move_entry,
    "input": swap_input,
    "position": shift_positions,
    "prefix": shorten_prefix,
}


def start(tmp_path, name="no_cache", **changes):
    configuration = CONFIGURATIONS[name]
    config = dataclasses.replace(configuration.engine_config(3), **changes)
    engine = SimulatedEngine(config, configuration.requests(3), tmp_path / "trace.arrow")
    return engine, Probe(engine, Clock())


@pytest.mark.parametrize("kind", DAMAGE)
def test_sees_what_the_next_forward_of_the_request_has_wrong(kind, tmp_path):
    engine, probe = start(tmp_path)
    with engine:
        while not any(r.cached_len > 4 for r in engine.scheduler.running):
            engine.step()
        assert probe.first is None
        # Once decoding goes on; a prefill that comes first reads other rows.
        request = next(r for r in engine.scheduler.running if r.cached_len > 4)
        slot = int(engine.memory.req_to_token[request.row, request.cached_len - 1])
        DAMAGE[kind](engine, request, slot)
        for _ in range(40):
            before = engine.recorder.next_forward
            engine.step()
            if probe.first is not None:
                break
        assert probe.first is not None
        assert probe.first.kind == kind.split()[0]
        assert before <= probe.first.forward < engine.recorder.next_forward
        if kind in ("bytes", "content"):
            assert (probe.first.request, probe.first.slot) == (request.name, slot)


def test_noise_is_no_damage(tmp_path):
    engine, probe = start(tmp_path)
    with engine:
        for _ in range(60):
            engine.step()
            for pool in engine.memory.pools:
                for stream in range(len(pool.group.streams)):
                    pool.stream_bytes(stream)[:, 8] ^= 0x03
    assert probe.first is None


def test_sees_what_only_a_sweep_reads(tmp_path):
    engine, probe = start(tmp_path, "sweeps")
    with engine:
        while not (free := [n for n in engine.memory.cache.tree.walk() if not n.lock and not n.children]):
            engine.step()
        node = free[-1]
        engine.memory.pools[0].stream_bytes(0)[node.page * engine.memory.page_size + 2, 0] ^= 0xFF
        swept = engine.counters.sweeps
        while probe.first is None and engine.step():
            pass
        assert probe.first is not None
        assert probe.first.kind == "sweep"
        assert probe.first.slot == node.page * engine.memory.page_size + 2
        assert probe.first.position == (node.depth - 1) * engine.memory.page_size + 2
        assert engine.counters.sweeps == swept + 1


def test_only_the_window_is_read_of_a_sliding_pool(tmp_path):
    engine, probe = start(tmp_path, "swa", prefix_cache=False)
    window = engine.config.window
    with engine:
        while not any(r.cached_len > window + 10 for r in engine.scheduler.running):
            engine.step()
        request = next(r for r in engine.scheduler.running if r.cached_len > window + 10)
        row = engine.memory.req_to_token[request.row]
        pool = engine.memory.pools[1]
        gone = engine.memory.lut[row[: request.cached_len - window - 6]]
        assert not gone.any()
        pool.content[0] += np.uint64(1)  # slot 0, to which they all lead now, is nobody's
        engine.step()
        assert probe.first is None
        pool.content[engine.memory.lut[row[request.cached_len - 2]]] += np.uint64(1)
        while probe.first is None and engine.step():
            pass
        assert probe.first is not None
        assert (probe.first.kind, probe.first.group) == ("content", 1)
