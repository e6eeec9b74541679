"""A paged engine that is shown to the recorder, by the adapter in examples/: clean when healthy, and its faults have names."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.capture.block_use import BlockUse, ShownBlocks
from kvcanary.recorder.capture.paged import PagedRecorder
from kvcanary.recorder.capture.privacy import IdentityValue
from kvcanary.recorder.trace.header import EngineInfo, Oracle
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.schema import TIER_HOST

from ..support.engines.documented_engine import judged
from ..support.engines.nano import BLOCK, CONTEXT, DIM, HEADS, VOCAB, Llm, attach


def serve(llm: Llm, seed: int, before_step: Callable[[int], None] = lambda _: None) -> list[list[int]]:
    """Run requests that share prefixes, are chunked and preempted; return their tokens."""
    rng = random.Random(seed)
    shared, asked = [rng.randrange(1, VOCAB) for _ in range(4 * BLOCK)], []
    for step in range(400):
        while len(asked) < 14 and len(llm.scheduler.waiting) < 3:
            prompt = shared[: rng.choice([0, 4, 8, 16])] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 20))]
            asked.append(llm.add_request(prompt, rng.randint(1, 14)))
        before_step(step)
        if not llm.step() and len(asked) == 14:
            return [seq.token_ids for seq in asked]
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_engine_is_clean_and_gives_the_same_tokens(tmp_path: Path, seed: int) -> None:
    llm = Llm()
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True)
    recorded = serve(llm, seed)
    recorder.close()
    assert recorded == serve(Llm(), seed)
    summary = judged(tmp_path / "trace.arrow")
    assert summary.verdict.value == "clean", (summary.violations_by_reason, summary.findings_by_kind, summary.doubts)
    assert {"alloc", "free", "evict", "status", "request"} <= set(summary.events)
    preempted = summary.events["status"] > 2 * summary.requests  # more went and came than there are
    assert preempted or seed
    with TraceReader(tmp_path / "trace.arrow") as reader:
        assert any("the slot history is derived" in note for note in reader.header.notes)


def _freed_too_early(llm: Llm) -> bool:
    for seq in llm.scheduler.running:
        if len(seq.block_table) > 1 and len(seq) < seq.end:
            llm.scheduler.block_manager.free_block_ids.append(seq.block_table[0])
            return True
    return False


def _leaked(llm: Llm) -> bool:
    """The last block of a request that is about to end, which is not full and so not cached, counts a user too many."""
    for seq in llm.scheduler.running:
        if len(seq) == seq.end - 1 and len(seq) % BLOCK > 1:
            llm.scheduler.block_manager.users[seq.block_table[-1]] += 1
            return True
    return False


def _given_out_twice(llm: Llm) -> bool:
    manager = llm.scheduler.block_manager
    used = [
        b for seq in llm.scheduler.running for b in seq.block_table[1:] if b not in manager.hash_to_block_id.values()
    ]
    if used:
        manager.free_block_ids.appendleft(used[0])
    return bool(used)


def _cache_names_another(llm: Llm) -> bool:
    """The hash of a prefix leads to another prefix's block."""
    known = llm.scheduler.block_manager.hash_to_block_id
    for seq in llm.scheduler.waiting:
        one = tuple(seq.token_ids[:BLOCK])
        other = next((key for key in known if len(key) == BLOCK and key != one), None)
        if one in known and other and len(seq) > BLOCK and not seq.block_table:
            known[one], known[other] = known[other], known[one]
            return True
    return False


FAULTS = {
    _freed_too_early: {"read_after_free", "read_of_foreign_slot"},
    _leaked: {"slot_leaked"},
    _given_out_twice: {"read_after_free", "read_of_foreign_slot", "write_to_foreign_slot"},
    _cache_names_another: {"hit_differs"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_allocator_has_its_name(tmp_path: Path, fault: Callable[[Llm], bool]) -> None:
    llm, done = Llm(), []

    def before_step(step: int) -> None:
        if step >= 6 and not done and fault(llm):
            done.append(step)

    recorder = attach(llm, tmp_path / "trace.arrow")
    serve(llm, 1, before_step)
    recorder.close()
    assert done
    summary = judged(tmp_path / "trace.arrow")
    assert FAULTS[fault] & set(summary.findings_by_kind), (summary.violations_by_reason, summary.findings_by_kind)


@pytest.mark.parametrize("swap", [False, True])
def test_with_the_oracle_a_swap_that_everybody_believes_is_found(tmp_path: Path, swap: bool) -> None:
    """Two requests get each other's token: scheduler, input and samples agree on it, the oracle does not."""
    llm = Llm()
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True, oracle=Oracle(vocab_size=VOCAB))
    run, run_model, batch, swapped = llm.model_runner.run, llm.model_runner.run_model, [], []

    def note_batch(seqs: Any, is_prefill: bool) -> list[int]:
        batch[:] = seqs
        return run(seqs, is_prefill)

    def sample(*args: Any) -> list[int]:
        run_model(*args)
        ends = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in batch]
        tokens = recorder.oracle_tokens([seq.seq_id for seq in batch], ends).tolist()
        if swap and not swapped and len(tokens) > 1 and recorder.next_forward > 5:
            tokens[0], tokens[1] = tokens[1], tokens[0]
            swapped.append(recorder.next_forward)
        return tokens

    llm.model_runner.run, llm.model_runner.run_model = note_batch, sample  # type: ignore[method-assign]
    serve(llm, 3)
    recorder.close()
    summary = judged(tmp_path / "trace.arrow")
    assert not summary.findings
    assert set(summary.violations_by_reason) == ({"WRITE_TOKEN"} if swap else set())
    if swap:
        assert summary.first_violation_forward == swapped[0]


@pytest.mark.parametrize("all_layers", [True, False])
@pytest.mark.parametrize("kind", ["bad_values", "layer_changed"])
def test_a_layer_of_which_nothing_is_kept_in_full_is_looked_at_in_turn(
    tmp_path: Path, kind: str, all_layers: bool
) -> None:
    llm = Llm()
    values, run_model = llm.model_runner.kv_cache[1, 1].view(-1), llm.model_runner.run_model

    def spoilt(*args: Any) -> list[int]:
        tokens = run_model(*args)
        if kind == "bad_values" and recorder.next_forward == 9:
            values.view(-1, HEADS * DIM)[CONTEXT.slot_mapping[-1]] = 0
        return tokens

    def before_step(_: int) -> None:
        if kind == "layer_changed" and recorder.next_forward == 9:
            values.add_(1.0)

    llm.model_runner.run_model = spoilt  # type: ignore[method-assign]
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True, all_layers=all_layers)
    serve(llm, 1, before_step)
    recorder.close()
    with TraceReader(tmp_path / "trace.arrow") as reader:
        streams = reader.header.groups[0].streams
    assert [(one.half, one.samples, one.layers) for one in streams] == [
        ("K", False, ()),
        ("V", False, ()),
        *([("K", True, (0, 1)), ("V", True, (0, 1))] if all_layers else []),
    ]
    summary = judged(tmp_path / "trace.arrow")
    assert {*summary.findings_by_kind} == ({kind} if all_layers else set())


def test_what_is_loaded_into_blocks_that_were_just_given_out_comes_behind_that(tmp_path: Path) -> None:
    """A swap, between two forwards: blocks of a request go to the host, and come back into others."""
    path, shown = tmp_path / "trace.arrow", {"a": [1, 2]}
    pool, host = np.zeros((8, 4, 1, 16), np.uint8), np.zeros((4, 4, 1, 16), np.uint8)

    def blocks() -> BlockUse:
        return BlockUse(dict(shown), free=[n for n in range(1, 8) if not any(n in held for held in shown.values())])

    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="paged"),
        keys={0: pool},
        values=None,
        axes="block slot head dim",
        block_size=4,
        max_requests=2,
        max_len=8,
        padding_blocks=[0],
        host_blocks=4,
        blocks=blocks,
        strict=True,
    )

    def forward(name: str, prefix: int, count: int) -> None:
        places = range(prefix, prefix + count)
        recorder.before_step(
            requests=[name],
            prefix_lens=[prefix],
            extend_lens=[count],
            input_ids=[p + 5 for p in places],
            positions=list(places),
            slots=[shown[name][p // 4] * 4 + p % 4 for p in places],
            block_tables=[shown[name]],
        )
        for p in places:
            pool[shown[name][p // 4], p % 4] = p + 1
        recorder.after_forward()

    forward("a", 0, 6)
    host[:2] = pool[[1, 2]]
    recorder.kv_copy(group=0, src=[4, 8], dst=[0, 4], count=[4, 4], dst_tier=TIER_HOST)
    shown["a"], shown["b"] = [], [3]
    forward("b", 0, 2)
    shown["a"] = [5, 6]
    pool[[5, 6]] = host[:2]
    recorder.kv_copy(group=0, src=[0, 4], dst=[20, 24], count=[4, 4], src_tier=TIER_HOST)
    forward("a", 6, 1)
    recorder.close()
    kinds = [event.kind for event in read_trace(path) if event.kind in ("alloc", "free", "kv_copy")]
    assert kinds == ["alloc", "kv_copy", "free", "alloc", "alloc", "kv_copy"]
    assert recorder.header.groups[0].host_num_slots == 16
    assert judged(path).verdict.value == "clean"


def test_layers_that_cannot_be_looked_at_in_turn_are_named(tmp_path: Path) -> None:
    def recorded(pool: Any, **options: Any) -> PagedRecorder:
        sizes = {"axes": "slot byte", "block_size": 4, "max_requests": 2, "max_len": 8}
        return PagedRecorder(
            tmp_path / "trace.arrow",
            engine=EngineInfo(name="paged"),
            keys={3: pool},
            values=None,
            **sizes,
            **options,
        )

    with pytest.raises(ValueError, match=r"watched is \[1\], expected some of the layers of keys: \[3\]"):
        recorded(np.zeros((24, 16), np.uint8), watched=[1])
    recorder = recorded(np.zeros((24, 10), np.uint8))
    recorder.close()
    (unseen,) = recorder.header.not_watched
    assert (unseen.what, unseen.name) == ("bytes", "all layers")
    assert "cannot be looked at in turn" in unseen.reason


def changes(
    shown: ShownBlocks, tables: dict[Any, list[int]], cached: tuple[int, ...], free: Any
) -> list[tuple[Any, ...]]:
    return [tuple(change[:4]) for change in shown.compare(BlockUse(tables, cached, free))]


def test_what_is_shown_says_who_got_what() -> None:
    shown = ShownBlocks(padding=[0])
    alloc, free, evict = "alloc", "free", "evict"
    assert changes(shown, {"a": [1, 2], "b": []}, (), [3, 4]) == [(alloc, "", "a", [1, 2])]
    # Block 2 is cached before a forward has filled it: handed over one showing later.
    assert changes(shown, {"a": [1, 2, 3]}, (1, 2), [4]) == [(alloc, "", "a", [3])]
    assert changes(shown, {"a": [1, 2, 3], "b": [1, 4, -1, 0]}, (1, 2), []) == [
        (alloc, "cached", "a", [1, 2]),
        (alloc, "", "b", [4]),
        (alloc, "shared", "b", [1]),
    ]
    assert changes(shown, {"b": [1, 4]}, (1, 2), [2, 3]) == [(free, "", "a", [3])]
    assert changes(shown, {"b": [1, 4], "c": [2]}, (1,), [3]) == [(evict, "", None, [2]), (alloc, "", "c", [2])]
    assert changes(shown, {"b": [1, 4], "c": [2], "d": [2]}, (1,), [3]) == [(alloc, "shared", "d", [2])]  # a fork
    assert changes(shown, {"b": [1, 4], "c": [2], "d": [2, 4]}, (1,), [3]) == [(alloc, "shared", "d", [4])]
    assert changes(shown, {"b": [1, 4], "c": [2], "d": [2, 4], "e": [4]}, (1,), [3]) == [(alloc, "", "e", [4])]  # twice
    assert changes(shown, {"b": [1, 4], "c": [2], "d": [2, 4]}, (1,), [3, 4]) == [(free, "", None, [4])]  # too early
    assert changes(shown, {"c": [2], "d": [2, 4]}, (1,), [3, 4]) == []
    assert changes(shown, {"d": [4]}, (), [3, 4, 1]) == [(evict, "", None, [1])]  # 2 has leaked ...
    assert changes(shown, {"d": [4]}, (), [3, 4, 1, 2]) == [(free, "", None, [2])]  # ... and was only late
    assert changes(shown, {"d": [4]}, (3,), [3, 4, 1, 2]) == [
        (alloc, "cached", None, [3])
    ]  # the cache names what is free


@pytest.mark.parametrize(("free", "given"), [((4,), False), ((1, 4), False), ((3, 4), True)])
def test_what_stands_in_the_place_of_a_block_that_is_not_given_back_was_not_given(
    free: tuple[int, ...], given: bool
) -> None:
    """As where somebody else's step fills in the same table."""
    shown = ShownBlocks()
    changes(shown, {"a": [1, 2], "b": [3, 5]}, (), [4])
    found = changes(shown, {"a": [1, 2], "b": [1, 5]}, (), free)
    assert found == ([("free", "", "b", [3]), ("alloc", "shared", "b", [1])] if given else found[: 1 in free])
    assert changes(shown, {"a": [1, 2], "b": [1, 5]}, (), free) == []


@pytest.mark.parametrize("leaks", [False, True])
def test_a_cached_block_that_counts_more_users_than_have_it_has_leaked(leaks: bool) -> None:
    shown = ShownBlocks()
    for _ in range(3):
        shown.compare(BlockUse({"a": [1, 2], "b": [1, 3]}, (1, 2), [4], {1: 2, 2: 1, 3: 1}))
    counts = {1: 2, 2: 1, 3: 1} if leaks else {1: 1, 3: 1}
    found = shown.compare(BlockUse({"b": [1, 3]}, (1, 2), [4] if leaks else [2, 4], counts))
    assert [change for change in found if change.note] == (
        [("alloc", "cached", "a", [1, 2], "still used")] if leaks else []
    )


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_the_cache_gives_up_under_a_reader_is_evicted(elsewhere: bool) -> None:
    """As where a lock was released twice: it goes to the free list, or to the next request at once."""
    shown = ShownBlocks()
    alloc, evict = "alloc", "evict"
    changes(shown, {"a": [1, 2]}, (), [3] if elsewhere else [])
    assert changes(shown, {"a": [1, 2]}, (1, 2), [3] if elsewhere else []) == []
    assert changes(shown, {"a": [1, 2]}, (1, 2), [3] if elsewhere else []) == [(alloc, "cached", "a", [1, 2])]
    given = {"b": [3, 1]} if elsewhere else {}
    found = changes(shown, {"a": [1, 2], **given}, (2,), [] if elsewhere else [1])
    assert found == [(evict, "", None, [1]), *([(alloc, "", "b", [1, 3])] if elsewhere else [])]


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_fills_a_block_that_the_cache_gave_up_under_a_reader_was_given_it(goes_on: bool) -> None:
    """Also at the very place where the reader has it; who goes on from it has joined it."""
    shown = ShownBlocks()
    for _ in range(3):
        changes(shown, {"a": [1, 2]}, (1, 2), [])
    use = BlockUse({"a": [1, 2], "b": [1]}, (2,), [])
    found = [tuple(change[:4]) for change in shown.compare(use, [] if goes_on else [1], {"b": int(goes_on)})]
    anew = [("evict", "", None, [1]), ("alloc", "", "b", [1])]
    assert found == ([("alloc", "shared", "b", [1])] if goes_on else anew)


def test_what_the_cache_gives_up_while_there_is_room_is_given_back() -> None:
    shown = ShownBlocks()
    changes(shown, {"a": [1, 2]}, (), [3])
    changes(shown, {"a": [1, 2]}, (1, 2), [3])
    changes(shown, {"a": [1, 2]}, (1, 2), [3])
    assert changes(shown, {"a": [1, 2]}, (2,), [1, 3]) == [("free", "", None, [1])]


@pytest.mark.parametrize("writes", [False, True])
def test_a_cached_block_that_a_running_request_writes_was_not_lent_to_it(writes: bool) -> None:
    """As where it is computed beyond what it was given, through what its row's last owner had there."""
    shown = ShownBlocks()
    changes(shown, {"a": [1], "b": [2]}, (), [3])
    changes(shown, {"b": [2]}, (1,), [3])
    found = [tuple(change[:4]) for change in shown.compare(BlockUse({"b": [2, 1]}, (1,), [3]), [1] if writes else [2])]
    assert found == ([] if writes else [("alloc", "shared", "b", [1])])
    assert changes(shown, {}, (1,), [2, 3]) == [("free", "", "b", [2])]


@pytest.mark.parametrize("kept", [0, 1, None])
@pytest.mark.parametrize("grows", [False, True])
def test_a_cached_block_that_the_free_list_gave_out_was_evicted_whatever_the_cache_says(
    kept: int | None, grows: bool
) -> None:
    """As where its key is left behind; one that a request goes on from was lent."""
    shown = ShownBlocks()
    changes(shown, {"a": [1]}, (), [2, 3])
    changes(shown, {}, (1,), [1, 2, 3])
    if grows:
        changes(shown, {"b": [3]}, (1,), [1, 2])
    goes_on = {} if kept is None else {"b": kept + grows}
    use = BlockUse({"b": [3, 1] if grows else [1]}, (1,), [2] if grows else [2, 3])
    found = [tuple(change[:4]) for change in shown.compare(use, [1], goes_on)]
    anew = [("evict", "", None, [1]), ("alloc", "", "b", [1])]
    lent = [] if grows else [("alloc", "shared", "b", [1])]
    assert found == (anew if kept == 0 else lent)
    assert changes(shown, use.tables, use.cached, use.free) == ([("alloc", "cached", "b", [1])] if kept == 0 else [])


def test_who_is_said_to_have_ended_was_not_preempted(tmp_path: Path) -> None:
    llm = Llm()
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True)
    asked = [llm.add_request([number + 1, 2, 3], 4) for number in range(3)]
    while llm.step():
        for seq in asked[1:]:
            if len(seq) == seq.end:
                recorder.ended(seq.seq_id)
    recorder.ended(asked[1].seq_id)
    recorder.ended(asked[2].seq_id)
    recorder.close()
    told = [event for event in read_trace(tmp_path / "trace.arrow") if event.kind == "status"]
    left = {
        event.scalar("request_id"): event.scalar("status") for event in told if event.scalar("status") != "admitted"
    }
    assert [left[seq.seq_id] for seq in asked] == ["retracted", "finished", "finished"]
    assert judged(tmp_path / "trace.arrow").verdict.value == "clean"


ADAPTERS = [IdentityValue("adapter", "one"), IdentityValue("adapter", "two"), IdentityValue("adapter", "")]


@pytest.mark.parametrize("said", ["nothing", "all", "some"])
def test_what_kv_depends_on_beside_tokens_is_declared_or_said_not_to_be(tmp_path: Path, said: str) -> None:
    llm = Llm()
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True)
    others = [IdentityValue("salt", ""), IdentityValue("media", ""), IdentityValue("weights", "the first")]
    asked = []
    for number, adapter in enumerate(ADAPTERS):  # the cache knows tokens alone, and lends its blocks across adapters
        asked.append(llm.add_request([*range(1, 2 * BLOCK + 1), 40 + number], 3))
        if said == "all" or (said == "some" and number != 1):
            recorder.declare(asked[-1].seq_id, [adapter, *others])
        while llm.step():
            pass
    recorder.close()
    summary = judged(tmp_path / "trace.arrow")
    [row] = [row for row in summary.coverage if row.what == "identity"]
    if said == "all":
        assert (row.watched, row.total, row.words) == (4, 4, "")
        assert set(summary.findings_by_kind) == {"identity"} and summary.first_finding["request"] == str(
            asked[1].seq_id
        )
    elif said == "some":
        each = "(of 1 of 3 requests)"
        assert (
            row.words
            == f"which LoRA adapter {each}, cache salt {each}, weights {each}, media {each} KV is computed with"
        )
        assert set(summary.findings_by_kind) == {"identity"} and summary.first_finding["request"] == str(
            asked[2].seq_id
        )
    else:
        assert (row.watched, row.words) == (0, "which LoRA adapter, cache salt, weights, media KV is computed with")
        assert summary.verdict.value == "clean"


def test_attached_late_it_knows_nothing_of_what_was_before(tmp_path: Path) -> None:
    llm, recorder = Llm(), []

    def before_step(step: int) -> None:
        if step == 9:
            recorder.append(attach(llm, tmp_path / "trace.arrow", strict=True))

    serve(llm, 2, before_step)
    recorder[0].close()
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.violations, summary.findings) == (0, 0)
    assert any("had run before" in loss for loss in summary.losses)


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_who_is_let_in_again_before_the_next_look_was_preempted(tmp_path: Path, said: bool, others: bool) -> None:
    """It computes its prompt again; in the very blocks that it had nobody knows of it but the engine."""
    path, shown = tmp_path / "trace.arrow", {"a": [1, 2], "b": [3]}
    pool = np.zeros((8, 4, 1, 16), np.uint8)

    def blocks() -> BlockUse:
        return BlockUse(dict(shown), free=[n for n in range(1, 8) if not any(n in held for held in shown.values())])

    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="paged"),
        keys={0: pool},
        values=None,
        axes="block slot head dim",
        block_size=4,
        max_requests=2,
        max_len=8,
        padding_blocks=[0],
        blocks=blocks,
        strict=True,
    )

    def forward(prefix: list[int], extend: list[int]) -> None:
        spans = list(zip(shown.values(), prefix, extend, strict=True))
        places = [(held, p) for held, begin, count in spans for p in range(begin, begin + count)]
        recorder.before_step(
            requests=[*shown],
            prefix_lens=prefix,
            extend_lens=extend,
            input_ids=[p + 5 for _, p in places],
            positions=[p for _, p in places],
            slots=[held[p // 4] * 4 + p % 4 for held, p in places],
            block_tables=[[*held, -1][:2] for held in shown.values()],
        )
        recorder.after_forward()

    forward([0, 0], [5, 2])
    forward([5, 2], [1, 1])
    if others:
        shown["a"] = [5, 4]
    if said:
        recorder.preempted("a")
    forward([0, 3], [6, 1])
    forward([6, 4], [1, 0])
    recorder.close()
    told = [event.scalar("status") for event in read_trace(path) if event.kind == "status"]
    known = said or others
    assert told == ["admitted", "admitted", *(["retracted", "admitted"] if known else [])]
    assert judged(path).findings_by_kind == ({} if known else {"seq_len_backwards": 1})


def defragment(llm: Llm, to: dict[int, int], *, first: int) -> None:
    """Move blocks, from a layer on, and call them by their new numbers everywhere; what is moved onto goes the other way."""
    manager, cache = llm.scheduler.block_manager, llm.model_runner.kv_cache
    cache[:, first:, [*to.values()]] = cache[:, first:, [*to]].clone()
    for seq in (*llm.scheduler.running, *llm.scheduler.waiting):
        seq.block_table = [to.get(block, block) for block in seq.block_table]
    manager.hash_to_block_id = {key: to.get(block, block) for key, block in manager.hash_to_block_id.items()}
    users = {to.get(block, block): count for block, count in enumerate(manager.users)}
    manager.users = [users[block] for block in range(len(users))]
    held = [to.get(block, block) for block in manager.free_block_ids]
    manager.free_block_ids.clear()
    manager.free_block_ids.extend(held)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_moved_with_whoever_has_them(tmp_path: Path, seed: int, first: int) -> None:
    llm, rng, steps = Llm(), random.Random(seed), []
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True)

    def move(step: int) -> None:
        if step % 5 == 4:
            chosen = rng.sample(range(len(llm.scheduler.block_manager.users)), 6)
            to = dict(zip(chosen, chosen[1:] + chosen[:1], strict=True))  # cached, held, shared and free ones
            defragment(llm, to, first=first)
            recorder.moved(to)
            steps.append(step)

    recorded = serve(llm, seed, move)
    recorder.close()
    summary = judged(tmp_path / "trace.arrow")
    assert len(steps) > 5 and summary.events["kv_copy"] == len(steps)
    if not first:
        assert recorded == serve(Llm(), seed)
        assert summary.verdict.value == "clean", (summary.violations_by_reason, summary.findings_by_kind)
    else:  # the first layer's bytes stay where they were
        assert recorded != serve(Llm(), seed) and "VERIFY_KV_HASH" in summary.violations_by_reason


@pytest.mark.parametrize("said", [False, True])
def test_a_running_request_may_go_back_if_that_is_said(tmp_path: Path, said: bool) -> None:
    llm, rewound = Llm(), []
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True)

    def rewind(step: int) -> None:
        for seq in llm.scheduler.running if step % 4 == 3 else ():
            if len(seq.token_ids) > seq.end - 4 and seq.num_cached_tokens % BLOCK > 2:
                seq.token_ids[-2:] = [seq.token_ids[-2] % (VOCAB - 1) + 1]  # another token in the place of two
                seq.num_cached_tokens -= 1
                rewound.append(seq.seq_id)
                if said:
                    recorder.rewound(seq.seq_id)

    serve(llm, 1, rewind)
    recorder.close()
    summary = judged(tmp_path / "trace.arrow")
    assert len(rewound) > 2
    if said:
        assert summary.verdict.value == "clean", (summary.violations_by_reason, summary.findings_by_kind)
    else:
        assert "seq_len_backwards" in summary.findings_by_kind or "input_not_sampled" in summary.findings_by_kind


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": BLOCK // 2}, f"block_size is {BLOCK // 2}, expected {BLOCK}"),
        ({"axes": "slot block head dim"}, f"block_size is {BLOCK}, expected 8"),
    ],
)
def test_a_block_size_that_is_not_the_pools_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    given = {"block_size": BLOCK, "axes": "block slot head dim"} | options
    with pytest.raises(ValueError, match=said):
        PagedRecorder(
            tmp_path / "trace.arrow", engine=EngineInfo(), keys={0: np.zeros((8, BLOCK, 1, 4), np.float32)}, values=None,
            max_requests=4, max_len=64, **given,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prefix_lens": [-1]}, "prefix_lens has -1"),
        ({"extend_lens": [65]}, "a request has 65 tokens, expected at most max_len, 64"),
        ({"requests": [["a"]]}, r"requests has \['a'\], expected names or numbers"),
        ({"mode": "prefill"}, "mode is 'prefill', expected one of"),  # which a call within the call says
    ],
)
def test_a_strict_recorder_names_what_is_wrong_and_its_trace_is_not_clean(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    pool, path = np.ones((8, BLOCK, 1, 4), np.float32), tmp_path / "trace.arrow"
    recorder = PagedRecorder(
        path, engine=EngineInfo(), keys={0: pool}, values=None, axes="block slot head dim", block_size=BLOCK, max_requests=4,
        max_len=64, strict=True,
    )  # fmt: skip
    right = {
        "requests": ["a"],
        "prefix_lens": [0],
        "extend_lens": [1],
        "input_ids": [5],
        "positions": [0],
        "slots": [4],
    }
    recorder.before_step(**right)
    recorder.after_forward(sampled_tokens=[6], sampled_lens=[1])
    with pytest.raises((TypeError, ValueError), match=said):
        recorder.before_step(**(right | wrong))
    recorder.close()
    summary = judged(path)
    assert summary.verdict.value == "inconclusive" and len(summary.losses) == 1


def test_a_pool_that_nobody_writes_is_told_from_one_that_is_right(tmp_path: Path) -> None:
    llm = Llm()
    cache = llm.model_runner.kv_cache
    llm.model_runner.kv_cache = cache.clone()  # what the recorder is given is no longer the engine's
    recorder = attach(llm, tmp_path / "trace.arrow", strict=True)
    llm.model_runner.kv_cache = cache
    serve(llm, 0)
    recorder.close()
    summary = judged(tmp_path / "trace.arrow")
    assert (
        summary.verdict.value == "inconclusive" and "every byte of K and V that was recorded is 0" in summary.doubts[0]
    )


@pytest.mark.parametrize("same", [True, False])
def test_a_cached_block_may_be_computed_again_with_what_it_holds(tmp_path: Path, same: bool) -> None:
    """An engine may find a page behind one that it has to compute, and compute it all the same."""
    path, shown, cached = tmp_path / "trace.arrow", {"a": [1, 2]}, []
    pool = np.zeros((8, BLOCK, 1, 16), np.uint8)

    def blocks() -> BlockUse:
        return BlockUse(dict(shown), cached, free=[n for n in range(3, 8) if n not in [3] * ("b" in shown)])

    recorder = PagedRecorder(
        path, engine=EngineInfo(name="paged"), keys={0: pool}, values=None, axes="block slot head dim", block_size=BLOCK,
        max_requests=4, max_len=64, blocks=blocks, strict=True,
    )  # fmt: skip

    def step(name: str, tokens: list[int], begin: int) -> None:
        positions = np.arange(begin, len(tokens))
        slots = np.array(shown[name])[positions // BLOCK] * BLOCK + positions % BLOCK
        recorder.before_step(
            requests=[name], prefix_lens=[begin], extend_lens=[len(positions)], input_ids=tokens[begin:], positions=positions,
            slots=slots, block_tables=[shown[name]], tokens=[tokens],
        )  # fmt: skip
        pool.reshape(-1, 16)[slots] = np.array(tokens[begin:])[:, None]
        recorder.after_forward()

    step("a", [*range(1, 9)], 0)
    recorder.ended("a")
    del shown["a"]
    cached += [1, 2]
    shown["b"] = [1, 2, 3]
    step("b", [*range(1, 5), *(range(5, 9) if same else range(15, 19)), 9], BLOCK)
    recorder.close()
    summary = judged(path)
    assert set(summary.findings_by_kind) == (set() if same else {"write_to_foreign_slot"})
    assert summary.verdict.value == ("clean" if same else "corrupt")
