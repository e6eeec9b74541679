"""What wraps the engine's functions: it never changes, raises or holds up, and what it cost is known."""

import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary.recorder.engines.common import hooking
from kvcanary.recorder.engines.common.hooking import (
    PLACES,
    StepCost,
    Target,
    around,
    beside,
    harmless,
    wrap_method,
    wrap_often,
)
from kvcanary.recorder.engines.sglang import hooks as sglang_hooks
from kvcanary.recorder.engines.sglang.attachment import SglangAttachment
from kvcanary.recorder.engines.sglang.hooks import TARGETS
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.header import NotWatched


def test_a_hook_sees_arguments_result_and_exception_and_changes_none() -> None:
    seen: list[Any] = []

    def hook(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return lambda result, error: seen.append((result, error))

    wrapper = harmless(hook, lambda name, error: seen.append(("fault", name)))
    assert wrapper(lambda a, b: a + b, 2, b=3) == 5
    error = KeyError("engine's own")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError, match="engine's own"):
        wrapper(fail)
    assert seen == [((2,), {"b": 3}), (5, None), ((), {}), (None, error)]


def test_what_is_lost_if_the_engine_s_function_raises_is_said_once() -> None:
    faults: list[tuple[str, str]] = []

    def hook(kind: Any, name: str) -> Any:
        def generator(*_: Any) -> Any:
            yield
            pytest.fail("goes on behind a function that raised")

        generator.__name__ = name
        return functools.partial(harmless(kind(generator), lambda name, error: faults.append((name, str(error)))))

    def fail() -> None:
        raise KeyError("engine's own")

    inner, outer, other = hook(around, "inner"), hook(around, "outer"), hook(beside, "other")
    with pytest.raises(KeyError, match="engine's own"):
        other(outer, inner, fail)
    assert faults == [("inner", "the engine's function raised KeyError")]
    with pytest.raises(KeyError):
        other(fail)
    assert len(faults) == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_raises_is_reported_and_the_engine_goes_on(late: bool) -> None:
    faults: list[tuple[str, str]] = []

    def on_thing(*_: Any) -> Any:
        def finish(*_: Any) -> None:
            raise ValueError("injected")

        if late:
            return finish
        raise ValueError("injected")

    assert harmless(on_thing, lambda name, error: faults.append((name, str(error))))(lambda: 7) == 7
    assert faults == [("on_thing", "injected")]


def test_what_steps_cost_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooking, "ENTRIES_KEPT", 14)
    cost = StepCost(("on_a", "on_b"))
    assert cost.summary() == {"steps": 0}
    decode, extend = SimpleNamespace(name="DECODE"), SimpleNamespace(name="EXTEND")
    on_b, on_c = cost.places("on_b")[1], cost.places("on_c")
    assert on_c[0] == on_c[1] != on_b

    def spend(nanoseconds: int) -> None:
        cost.spent(nanoseconds * PLACES + on_b)
        for place in on_c:
            cost.spent(PLACES + place)

    def steps(*told: tuple[int, Any]) -> None:
        for nanoseconds, mode in told:
            spend(nanoseconds)
            cost.next_step(mode, 8)

    steps((9_000, decode), (5, extend), (1, decode), (3, decode))
    spend(7)  # in a step that has not ended
    assert cost.summary() == {
        "steps": 3,
        "engine_thread_ns_p50": 5,
        "engine_thread_ns_p99": 7,
        "by_forward": {"DECODE 8": [2, 7, 7], "EXTEND 8": [1, 3, 3]},
        "by_hook": {
            "DECODE 8": {"on_a before": 0, "on_a after": 0, "on_b before": 0, "on_b after": 5, "others": 2},
            "EXTEND 8": {"on_a before": 0, "on_a after": 0, "on_b before": 0, "on_b after": 1, "others": 2},
        },
    }
    steps(*[(100 + n, extend if n % 2 else decode) for n in range(20)])
    assert cost.summary()["steps"] < 10, "only the latest are kept"
    steps(*[(1, decode)] * 100)
    assert cost.summary()["steps"] < 20, "of steps of one kind, too"


def test_hooks_that_are_called_without_a_recording_keep_nothing() -> None:
    attachment = SglangAttachment(RecordingSettings(folder=None))
    model = harmless(attachment.on_model, attachment.fault, attachment.cost)
    other = harmless(lambda: None, attachment.fault, attachment.cost)
    for _ in range(100):
        model(lambda *_: None, None, None)
        other(lambda: None)
    assert len(attachment.cost.log) < 5


def test_each_hook_adds_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10, 15, 100, 107, 1000, 1004))
    monkeypatch.setattr(hooking, "perf_counter_ns", lambda: next(clock))
    cost = StepCost(("on_a",))
    mode = SimpleNamespace(name="DECODE")

    def on_a() -> Any:
        return lambda *_: None

    def on_b() -> None: ...

    cost.next_step(mode, 1)
    harmless(on_a, lambda *_: None, cost)(lambda: None)
    harmless(on_b, lambda *_: None, cost)(lambda: None)
    cost.next_step(mode, 1)
    assert cost.summary()["by_hook"] == {"DECODE 1": {"on_a before": 5, "on_a after": 7, "others": 4}}


def test_what_is_called_often_is_looked_at_when_something_happened() -> None:
    told: list[Any] = []
    owner = SimpleNamespace(step=lambda result: result)
    assert wrap_often(owner, "step", lambda *seen: told.append(seen), lambda *_: None)
    assert owner.step([]) == []
    assert told == []
    assert owner.step([7]) == [7]
    assert told == [([7], [7])]


def test_what_is_called_often_never_raises_its_own_and_says_what_the_engine_raised() -> None:
    faults: list[Any] = []

    def fail(*_: Any) -> None:
        raise KeyError("ours")

    def failing(*_: Any) -> None:
        raise ValueError("the engine's")

    owner = SimpleNamespace(good=lambda: [1], bad=failing)
    wrap_often(owner, "good", fail, lambda name, error: faults.append((name, type(error).__name__)))
    wrap_often(owner, "bad", fail, lambda name, error: faults.append((name, type(error).__name__)))
    assert owner.good() == [1]
    with pytest.raises(ValueError, match="the engine's"):
        owner.bad()
    assert faults == [("good", "KeyError"), ("bad", "EngineError")]


def test_wrap_method_says_whether_there_is_one() -> None:
    owner = SimpleNamespace(go=lambda x: x + 1, absent=None)
    calls: list[int] = []
    assert wrap_method(owner, "go", lambda x: calls.append(x), lambda *_: None)
    assert not wrap_method(owner, "absent", lambda x: None, lambda *_: None)
    assert (owner.go(4), calls) == (5, [4])


def test_find_takes_the_first_path_that_this_version_has() -> None:
    paths = ("no.such.module:thing", "json.encoder:NoSuchClass.method", "json.encoder:JSONEncoder.encode")
    assert Target("x", "", paths).find() == paths[2]
    assert Target("x", "", paths[:2]).find() is None


def test_what_cannot_be_hooked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    registry = SimpleNamespace(register=lambda path, hook, kind: registered.append(path))
    module = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.plugins.hook_registry", module)
    attachment = SimpleNamespace(on_a=None, on_b=None, fault=None, cost=None)
    a = Target("a", "x", ("json:dumps",))
    b = Target("b", "sampled tokens are not recorded", ("json:no_such", "json:neither"))
    assert sglang_hooks.register([a, b], attachment) == [
        NotWatched(what="other", name="not hooked: json.no_such", reason="sampled tokens are not recorded")
    ]
    assert registered == ["json.dumps"]
    essential = Target("b", "", b.paths, essential=True)
    with pytest.raises(ValueError, match=r"this SGLang has no json\.no_such; the adapter knows versions"):
        sglang_hooks.register([a, essential], attachment)
    assert registered == ["json.dumps"], "nothing is hooked by half"


def test_target_names_are_distinct() -> None:
    names = [path for target in TARGETS for path in target.paths]
    assert len(names) == len(set(names))


def test_the_engines_thread_goes_on_while_what_it_cost_is_summed_up() -> None:
    """The trace ends in a thread of its own, which must not hold what the hooks append to."""
    cost = StepCost()
    mode = SimpleNamespace(name="DECODE")
    for _ in range(100_000):
        cost.spent(PLACES)
    cost.next_step(mode, 1)
    begun, over = threading.Event(), threading.Event()

    def sum_up() -> None:
        for _ in range(20):
            cost.summary()
            begun.set()
        over.set()

    summing = threading.Thread(target=sum_up)
    summing.start()
    begun.wait()
    for _ in range(1_000_000):  # no more: what is appended makes each sum slower
        if over.is_set():
            break
        cost.spent(PLACES)  # raised BufferError
    summing.join()
