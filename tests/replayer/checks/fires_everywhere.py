"""A history check that was added as CONTRIBUTING.md says, declares nothing, and finds something in all that it is given.

As a program it is the replay command with this check among the others: `fires_everywhere.py REPLAY ARGUMENTS`. Processes
that the command starts read this file too, and so have the check.
"""

from kvcanary.recorder.trace.reader import EventView
from kvcanary.replayer import checks
from kvcanary.replayer.checks.check import HistoryCheck
from kvcanary.replayer.checks.history import ForwardView
from kvcanary.replayer.executors import executors
from kvcanary.replayer.executors.incremental import compiled_pass
from kvcanary.replayer.report.findings import Finding

NAME = "fires_everywhere"


class FiresEverywhere(HistoryCheck):
    """Looks at every forward, all that each of its requests reads, and every change of hands."""

    kind = NAME
    finds = "something happened"
    events = frozenset({"alloc", "free", "status"})

    def forward(self, view: ForwardView) -> list[Finding]:
        offsets = view.groups[0].plan.request_offsets
        return [
            self.of_request(
                view.forward,
                r,
                "is there",
                group=0,
                slot=int(view.groups[0].slots.sum()),
                count=int(offsets[r + 1] - offsets[r]),
            )
            for r in range(len(view.forward.request_ids))
        ]

    def event(self, view: EventView) -> list[Finding]:
        numbers = dict.fromkeys(("runner", "group", "req_pool_idx", "position", "slot"), -1)
        return [
            Finding(
                kind=NAME,
                event=view.number,
                forward=self.history.last_forward,
                time_ns=view.time_ns,
                request_id=int(view.scalar("request_id")),
                request="",
                detail=view.kind,
                **numbers,
            )
        ]


def register() -> None:
    """Add the check to those that there are, and have the compiled pass take small traces."""
    checks.CHECKS[NAME] = FiresEverywhere
    checks.CHECK_NAMES = executors.CHECK_NAMES = (*checks.CHECK_NAMES, NAME)
    checks.FINDING_KINDS[NAME] = FiresEverywhere.finds
    compiled_pass.WARM_UP_EVENTS = 0


if __name__ in ("__main__", "__mp_main__"):
    register()

if __name__ == "__main__":
    from kvcanary.replayer.cli.replay import replay_command

    replay_command()
