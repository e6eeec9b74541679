"""Equal tokens have equal V in a first layer: what differs from that is found, what is rounding or follows from more is not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.analysis.shrink.parts import EventCopies, Part, views_of
from kvcanary.analysis.shrink.proof import write_part
from kvcanary.analysis.shrink.shrink import NothingToShrinkError, shrink
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.kv_tensor import KvTensor
from kvcanary.recorder.capture.privacy import IdentityValue
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import ModelInfo, NotWatched, PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.model import repeats
from kvcanary.replayer.run.replay import ReplaySettings, replay
from kvcanary.replayer.run.streams import SegmentStream

from ...support.places import DATA

CLEAN = DATA / "corpus" / "vllm-clean-llama-salts.arrow"
FORWARD = 20  # a decode of several requests, late enough for their tokens to have come before
IDENTITY = ("identity_kind", "identity_start", "identity_count", "identity_hash")
WEIGHTS, MEDIA = 2, 3
LATE = 36  # from here on fewer than three repeats in ten are left
V = 1  # its stream: 16 bytes a token, behind those of K


@pytest.fixture(scope="module")
def recorded():
    """A clean run's header and events, of requests that declare their weights."""
    stream, copies = SegmentStream([CLEAN]), EventCopies()
    events = [copies.copy(view) for view, _ in views_of(stream.stream())]
    for event in events:
        if len(event.ints.get("identity_kind", ())):
            for name, value in zip(IDENTITY, (WEIGHTS, 0, 0, 5), strict=True):
                event.ints[name] = np.append(event.ints[name], value)
    return said(stream.header), events


def said(header, dtype="float32", **changes):
    """The header as one that says what the bytes are."""
    group = header.groups[0]
    streams = tuple(replace(stream, dtype=dtype) for stream in group.streams)
    return replace(header, groups=(replace(group, streams=streams), *header.groups[1:]), **changes)


def values(event):
    """A forward's V, `[T, 4] float32`, to be changed."""
    tokens = len(event.ints["input_ids"])
    event.bytes["kv_bytes"] = event.bytes["kv_bytes"].copy()
    return event.bytes["kv_bytes"].view(np.float32).reshape(2, tokens, 4)[V]


def judged(recorded, tmp_path, change, **settings):
    """Replay a changed copy; return its findings by kind, its violations and its incidents."""
    header, events = recorded
    copies = [type(event)(**{name: getattr(event, name) for name in event.__struct_fields__}) for event in events]
    for event in copies:
        event.bytes, event.ints = dict(event.bytes), dict(event.ints)
        change(event)
    trace, report = tmp_path / "t.arrow", tmp_path / "t.report"
    report.mkdir()
    write_part(Part(header, copies, []), trace)
    summary = replay(trace, settings=ReplaySettings(**settings), report=report)
    rows = find_incidents(report, [trace]).rows if summary.findings else []
    return summary.findings_by_kind, summary.violations, rows


def of_other_weights(event):
    """All that a forward computes is computed with weights that have been replaced."""
    if event.kind == "forward" and event.scalars["forward"] == FORWARD:
        values(event)[:] *= 0.5


def test_what_a_forward_left_that_failed_is_compared_with_nothing(recorded, tmp_path):
    def change(event):
        of_other_weights(event)
        if event.kind == "forward" and event.scalars["forward"] == FORWARD:
            event.scalars = {**event.scalars, "status": "failed"}

    assert judged(recorded, tmp_path, change)[:2] == ({}, 0)


@pytest.mark.parametrize("executor", ["interval", "stepwise"])
def test_tokens_of_other_weights_are_found_in_their_forward_and_nothing_else(recorded, tmp_path, executor):
    found, violations, rows = judged(recorded, tmp_path, of_other_weights, executor=executor)
    assert list(found) == ["token_bytes"] and violations == 0
    assert {row["kind"] for row in rows} == {"computed_with_other_weights"}
    assert rows[0]["first_forward"] == FORWARD and "other bytes than request" in rows[0]["sentence"]
    if executor == "interval":  # which would need the values that nobody is to read in it
        with pytest.raises(NothingToShrinkError, match="only the values of KV bytes show the incident"):
            shrink([tmp_path / "t.arrow"], tmp_path / "small.arrow")


def stored(recorded, **changes):
    """What was recorded as bytes that the pool stores, instead of those that the model hands to it."""
    header, events = said(recorded[0], **changes), recorded[1]
    group = header.groups[0]
    streams = tuple(replace(stream, origin="stored") for stream in group.streams)
    return replace(header, groups=(replace(group, streams=streams), *header.groups[1:])), events


@pytest.mark.parametrize("unseen", [False, True])
def test_where_the_way_into_the_pool_is_not_watched_it_may_be_damage(recorded, tmp_path, unseen):
    lacks = (NotWatched(what="submitted", name="target"),) if unseen else ()
    _, _, rows = judged(stored(recorded, not_watched=lacks), tmp_path, of_other_weights)
    assert {row["kind"] for row in rows} == {"computed_with_other_weights"}
    assert all(row["score"] <= 0.65 if unseen else row["score"] >= 0.7 for row in rows)
    assert ("may have been damaged on its way" in rows[0]["sentence"]) == unseen


def test_a_slot_that_a_later_token_of_the_forward_took_says_nothing_of_the_first(recorded, tmp_path):
    def twice(event):
        if event.kind == "forward" and event.scalars["forward"] == FORWARD:
            slots = event.ints["out_cache_loc"] = event.ints["out_cache_loc"].copy()
            slots[0] = slots[-1]
            values(event)[0] = values(event)[-1]

    assert "token_bytes" not in judged(stored(recorded), tmp_path, twice, checks=("token_bytes",))[0]


def rounded(event):
    if event.kind == "forward":
        values(event)[:] *= 1 + 1e-6 * (event.scalars["forward"] % 5)


def followed_by_more(event):
    if event.kind == "forward":
        values(event)[:] *= (1 + event.ints["positions"] % 7)[:, None]


def undeclared(event):
    of_other_weights(event)
    for name in set(IDENTITY) & set(event.ints):
        del event.ints[name]


def forget(event, kind):
    """A request does not declare one thing that its KV depends on."""
    if "identity_kind" in event.ints:
        kept = event.ints["identity_kind"] != kind
        event.ints.update({name: event.ints[name][kept] for name in IDENTITY})


def of_unknown_media(event):
    """SGLang's requests declare none if an item has no hash, or nobody knows where it stands."""
    of_other_weights(event)
    forget(event, MEDIA)


def loaded_anew(event):
    """Weights, or an adapter under its name, are replaced, and nobody says so."""
    if event.kind == "forward" and event.scalars["forward"] >= LATE:
        values(event)[:] *= 0.5


def swapped_for_a_while(event):
    """Weights that no request declares are others for some forwards, and then the old ones."""
    forget(event, WEIGHTS)
    if event.kind == "forward" and FORWARD <= event.scalars["forward"] < FORWARD + 4:
        values(event)[:] *= 0.5


def of_media(event):
    of_other_weights(event)
    if event.kind == "request" and "identity_kind" in event.ints:
        event.ints["identity_hash"] = np.where(event.ints["identity_kind"] == MEDIA, 7, event.ints["identity_hash"])


def of_adapters(event):
    """Every second request has an adapter of its own, and other V."""
    if event.kind == "request" and event.scalars["request_id"] % 2:
        event.ints["identity_hash"] = np.where(event.ints["identity_kind"] == 0, 7, event.ints["identity_hash"])
    if event.kind == "forward":
        owners = np.repeat(event.ints["request_ids"] % 2, event.ints["extend_lens"])
        values(event)[: len(owners)] *= (1 + owners)[:, None]


@pytest.mark.parametrize(
    "change",
    [
        *(rounded, followed_by_more, undeclared, of_media, of_adapters),
        *(of_unknown_media, loaded_anew, swapped_for_a_while),
    ],
)
def test_what_may_differ_is_not_found(recorded, tmp_path, change):
    assert judged(recorded, tmp_path, change, checks=("token_bytes",))[:2] == ({}, 0)


def test_tokens_of_another_adapter_are_found(recorded, tmp_path):
    def mixed_up(event):
        of_adapters(event)
        if event.kind == "forward" and event.scalars["forward"] == FORWARD:
            values(event)[:] *= 3  # no request's own

    found, violations, _ = judged(recorded, tmp_path, mixed_up, checks=("token_bytes",))
    assert list(found) == ["token_bytes"] and violations == 0


@pytest.mark.parametrize("dtype", ["", "bytes", "int8", "float32"])
def test_bytes_that_are_not_said_to_be_floats_are_not_judged(recorded, tmp_path, dtype):
    """A cache may keep 8-bit floats of a model in bfloat16: one more in a byte is then another value altogether."""
    header, events = recorded
    changed = said(header, dtype, model=replace(header.model, dtype="float32"))
    found, *_ = judged((changed, events), tmp_path, of_other_weights, checks=("token_bytes",))
    assert list(found) == (["token_bytes"] if dtype == "float32" else [])


def played(tmp_path, k, v, long=(), layers=1):
    """Replay prompts of 40 tokens, most of them the same, whose `k` and `v` follow from tokens, positions and the request.

    With `long`, requests, all others have 30. What further `layers` have follows from the request as well.
    """
    kv = np.zeros((2, layers, 64, 4), np.float32)
    half = [KvTensor(tensor=tuple(of_half), axes="slot value") for of_half in kv]
    streams = tuple(source.stream(name, layers=tuple(range(layers))) for name, source in zip("KV", half, strict=True))
    header = TraceHeader(
        model=ModelInfo(dtype="float32"),
        groups=(PoolGroup(name="full", num_slots=64, streams=streams, num_layers=layers),),
        tables=(StateTable(rows=4, width=64),),
    )
    recorder = Recorder(tmp_path / "t.arrow", header, kv_sources=dict(zip([(0, 0), (0, 1)], half, strict=True)))
    random, words = np.random.default_rng(3), np.arange(100, 140)
    prompts = [words] * 10 + [np.roll(words, 7)] * 2 + [random.permutation(words) for _ in range(3)] + [words] * 2
    for request, whole in enumerate(prompts):
        prompt = whole[: 30 if long and request not in long else 40]
        slots = np.arange(1, len(prompt) + 1)
        identity = [IdentityValue(kind, "") for kind in ("adapter", "weights", "media")]
        recorder.request(request_id=request, name=f"r{request}", prompt_len=len(prompt), identity=identity)
        recorder.before_forward(
            ForwardInput(
                mode="extend",
                req_pool_indices=[1],
                request_ids=[request],
                prefix_lens=[0],
                extend_lens=[len(prompt)],
                input_ids=prompt,
                positions=np.arange(len(prompt)),
                out_cache_loc=(slots,),
                reads=(np.zeros((4, 64), np.int32),),
            )
        )
        for of_half, computed in zip(kv, (k, v), strict=True):
            first = computed(prompt.astype(np.float64), np.arange(len(prompt)), request)[:, None] + np.arange(4)
            for layer, rows in enumerate(of_half):
                rows[slots] = first + layer * (1 + request)
        recorder.after_forward()
    recorder.close()
    report = tmp_path / "t.report"
    report.mkdir()
    summary = replay(tmp_path / "t.arrow", settings=ReplaySettings(checks=("token_bytes",)), report=report)
    return summary.findings_by_kind, find_incidents(report, [tmp_path / "t.arrow"]).rows if summary.findings else []


def of_the_token(tokens, positions, request):
    return tokens


def of_position(tokens, positions, request):
    return tokens + 0.37 * positions


def of_token_before(tokens, positions, request):
    return tokens + 0.37 * np.append(0, tokens[:-1])


@pytest.mark.parametrize("computed", [of_position, of_token_before])
def test_a_prompt_that_comes_again_does_not_show_that_v_follows_from_the_token_alone(tmp_path, computed):
    """As where positions are embedded (GPT-2, OPT), or n-grams of tokens; most of the traffic is one prompt."""
    assert played(tmp_path, computed, computed) == ({}, [])


def turned(tokens, positions, request):
    return tokens * np.cos(positions)


LAST_BUT_ONE = 15  # of the requests


def turned_by_the_next_position(tokens, positions, request):
    return turned(tokens, positions + (request == LAST_BUT_ONE), request)


def turned_by_the_batch(tokens, positions, request):
    return turned(tokens, positions + request % 5, request)


def turned_with_new_weights(tokens, positions, request):
    return turned(tokens, positions, request) * (2.0 if request > LAST_BUT_ONE // 2 else -1.0)


def turned_otherwise_at_last(tokens, positions, request):
    return turned(tokens, positions + (request > LAST_BUT_ONE) * (positions > 20), request)


def of_all_before(tokens, positions, request):
    return tokens * (1 + np.cumsum(tokens) % 7)


def turned_to_nothing(tokens, positions, request):
    """As two large values do that take one another away at one position, where only their rounding is left."""
    return np.where(positions == 7, 5.0 + 5 * (request == LAST_BUT_ONE), 100 * tokens * np.sin(positions - 7))


def other_in_one_request(tokens, positions, request):
    return tokens * (0.5 if request == LAST_BUT_ONE else 1.0)


@pytest.mark.parametrize("layers", [1, 3])
def test_k_that_another_position_has_turned_is_found_in_its_forward(tmp_path, layers):
    found, (incident,) = played(tmp_path, turned_by_the_next_position, of_the_token, layers=layers)
    assert found == {"token_bytes": 1}
    assert (incident["kind"], incident["first_forward"], incident["branch"]) == (
        "not_of_the_model",
        LAST_BUT_ONE,
        "content",
    )
    assert "rotated (RoPE) by another position" in incident["sentence"] and "at this position" in incident["sentence"]


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (turned, of_the_token),
        (turned_by_the_batch, of_the_token),  # as by the length of the longest request
        (turned_to_nothing, of_the_token),
        (turned_with_new_weights, of_the_token),  # of K alone (a norm, an adapter of q and k), and nobody says so
        (turned_by_the_next_position, of_position),  # nothing shows what K follows from
        (turned_otherwise_at_last, of_all_before),  # nor where the last prompt's V is that of the one before
    ],
)
def test_what_turns_k_is_learnt_from_the_file(tmp_path, k, v):
    assert played(tmp_path, k, v) == ({}, [])


def v_of_tokens_before(tokens, positions, request):
    return 100 * np.cos(tokens + 3.7 * np.append(0, tokens[:-1]))


def k_of_tokens_before(tokens, positions, request):
    return 100 * np.sin(tokens + 3.7 * np.append(0, tokens[:-1]) + positions)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_where_v_follows_from_more_than_the_token_k_does_too_however_many_differ(tmp_path, monkeypatch, kept):
    """As in a draft, which is fed what the target makes of a context: of more differences than are kept nothing follows."""
    monkeypatch.setattr(repeats, "_MAX_TOKENS", kept)
    assert played(tmp_path, k_of_tokens_before, v_of_tokens_before) == ({}, [])


def turned_by_its_length(tokens, positions, request):
    return turned(tokens, positions * (1 + (len(positions) > 35)), request)


def turned_by_the_longest(tokens, positions, request):
    """As beside a long one, once."""
    return turned(tokens, positions * (1 + (len(positions) > 35 or request == LAST_BUT_ONE)), request)


@pytest.mark.parametrize(("k", "found"), [(turned_by_its_length, 0), (turned_by_the_longest, 3)])
def test_a_length_may_choose_the_angles_of_a_request_and_of_no_other(tmp_path, k, found):
    """Angles for long texts and for short ones (Phi-3, "longrope"), one request at a time."""
    assert played(tmp_path, k, of_the_token, long=(4, 9))[0].get("token_bytes", 0) == found


def test_a_token_that_is_other_in_k_and_v_is_of_other_weights(tmp_path):
    found, (incident,) = played(tmp_path, other_in_one_request, other_in_one_request)
    assert found == {"token_bytes": 1} and incident["kind"] == "computed_with_other_weights"


@pytest.mark.parametrize(
    ("dtype", "size", "found"),
    [
        ("float8_e4m3fn", 40.0, ["token_bytes"]),
        ("float8_e5m2", 40.0, ["token_bytes"]),
        ("float8_e4m3fn", 2.0**-8, []),  # as much as two of the smallest steps
        ("float8_e5m2", 2.0**-15, []),
    ],
)
def test_values_of_8_bits_may_differ_by_a_code_and_are_found_if_by_more(recorded, tmp_path, dtype, size, found):
    header, events = recorded
    largest = max(float(np.abs(values(event)).max()) for event in events if event.kind == "forward")

    def coded(event):
        if event.kind != "forward":
            return
        given = values(event).copy() * np.float32(size / largest)
        if event.scalars["forward"] == FORWARD:
            given *= np.float32(0.5)
        codes = torch.from_numpy(np.tile(given, (1, 4))).to(getattr(torch, dtype)).view(torch.uint8).numpy()
        codes = codes - (codes & 127 > 0) * (event.ints["positions"] % 7 == 0)[:, None].astype(
            np.uint8
        )  # a code lower, now and then
        event.bytes["kv_bytes"].view(np.uint8).reshape(2, len(given), 16)[V] = codes

    assert list(judged((said(header, dtype), events), tmp_path, coded)[0]) == found
