"""Options and hypothesis profiles for all tests; where there is no GPU, Triton's interpreter."""

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

from .support import environment  # noqa: F401  # first of all, what libraries read when they are imported
from .support.quick_interpreter import quicken_interpreter

NORMAL_CASES = 500
# All that is imported and collected stays: to look for garbage meanwhile takes a sixth of the time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--conformance-cases",
        type=int,
        default=NORMAL_CASES,
        help="randomised cases for each kernel against the published canary (default 500; make fuzz runs 20000)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Started in the background or under nohup, a process ignores these, and so would every process that a test starts.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # A fuzz run asks for more of the property tests as well. Nothing is timed in a test: no deadline, no complaint of a
    # slow machine.
    cases = config.getoption("--conformance-cases")
    examples = 100 * cases // NORMAL_CASES if cases > NORMAL_CASES else 30
    settings.register_profile(
        "kvcanary",
        deadline=None,
        max_examples=examples,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kvcanary")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--conformance-cases") > NORMAL_CASES:
        return
    numbers: dict[str, int] = {}
    left: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("one_in")
        if item.get_closest_marker("long") is not None:
            left.append(item)
        elif marker is not None:
            name = item.nodeid.partition("[")[0]
            numbers[name] = numbers.get(name, -1) + 1
            left += [item] if numbers[name] % marker.args[0] else []
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    # What a dozen libraries and 4,000 tests hold lives to the end: no collection goes through it again and again.
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extensions look for what they leaked


def pytest_runtest_setup() -> None:
    quicken_interpreter()


@pytest.fixture
def pass_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the compiled pass take traces that are too small for it; what it leaves goes through the executor."""
    from kvcanary.replayer.executors.incremental import compiled_pass

    monkeypatch.setattr(compiled_pass, "WARM_UP_EVENTS", 0)


@pytest.fixture(scope="session")
def conformance_cases(pytestconfig: pytest.Config) -> int:
    """How many randomised cases a conformance test goes through."""
    count: int = pytestconfig.getoption("--conformance-cases")
    return count
