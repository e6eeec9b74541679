"""The user is told why nothing moves while the pass is compiled, which is once on a machine."""

import pytest
from click.testing import CliRunner
from kvcanary.kernels.dispatch import select
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.executors.incremental import compiled_pass

from ...support.places import DATA

TRACE = DATA / "clean_llama.arrow"
SAID = "compiling the fast path"


def stderr(*options: str) -> str:
    result = CliRunner().invoke(replay_command, ["--no-report", "--executor", "interval", *options, str(TRACE)])
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch, pass_from_the_start: None) -> None:
    """Have the pass take a small trace, and begin as if it had never been compiled."""

    def tell_and_select(loops, backend, *, before_compiling):
        before_compiling()
        return select(loops, backend)

    monkeypatch.setattr(compiled_pass, "select", tell_and_select)
    monkeypatch.setattr(compiled_pass, "is_kept", lambda _: False)


@pytest.mark.usefixtures("compiled_anew")
def test_one_line_says_so() -> None:
    assert stderr().count(SAID) == 1


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("large", [True, False])
def test_one_line_says_so_for_several_workers(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """It is compiled before they begin, and not for traces that they replay without it."""
    monkeypatch.setattr(compiled_pass, "LARGE_BYTES", 0 if large else 1 << 30)
    assert stderr("--jobs", "2", str(TRACE.with_name("clean_hybrid.arrow"))).count(SAID) == large


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_not_where_notes_are_not_wanted(option: str) -> None:
    assert SAID not in stderr(option)


def test_nothing_is_said_of_what_is_compiled_already(pass_from_the_start: None) -> None:
    stderr("--quiet")
    assert SAID not in stderr()
