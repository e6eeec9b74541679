"""Recurrent state that a forward reads, and that is not the state behind its own prefix."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...recorder.state.recurrent import STATE_EVENT, STATE_POSITION, STATE_REQUEST, Misread
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, register
from .history import ForwardView

SAID: Final = {  # by cause
    "other_prefix": "it holds another prefix's, of {position} tokens",
    "other_position": "it holds that of {position} tokens",
    "changed_bytes": "its bytes are not those that were left there",
    "padding": "it is padding's, which is nobody's",
    "cleared": "its bytes are those of a slot that was zeroed, and nobody was seen to fill it",
    "left_as_it_was": "the forward left it as it was, with another token computed",
    "as_anothers": "the forward left the same bytes in it as for another request, which ends with another token",
    "not_zeroed": "it has no tokens yet, and its bytes are not zeros",
    "begun_anew": "it began with no state",
    "same_forward": "another request of the forward writes it, too",
}


@register
class StateDiffers(HistoryCheck):
    """A request goes on from a state slot that holds another prefix, another position, or other bytes than were left there, or
    leaves it as it was, or as it leaves another's that ends with another token.

    What a slot holds is known by what filled it: a forward, a copy of another slot, or zeros. A slot that nobody was seen to
    fill is judged by its bytes alone: they may be those of a zeroed slot, if no forward has left such; a chain in which a token
    is unknown is held against no other.
    """

    kind = "state_differs"
    finds = "a request read recurrent state of another prefix or position than its own, or bytes that nobody left there"
    covered = Covered.COMPILED  # a pass takes no trace of an engine with state pools

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        """Yield a finding for each request that reads such a slot, and did not in its last forward."""
        forward = view.forward
        misread = self.history.states.apply(forward, view.tables.truth)
        for pool, header in enumerate(self.history.header.states):
            mine = {one.request: one for one in misread if one.pool == pool}
            if header.runner != forward.runner:
                continue
            new = self.repeats.new(pool, forward, {r: np.array([one.slot]) for r, one in mine.items()})
            for request, one in mine.items():
                if new[request].all():
                    yield self._finding(view, one)

    def pending(self) -> bool:
        """Say whether a request's last forward was reported, which no keyframe holds."""
        return bool(len(self.repeats))

    def _finding(self, view: ForwardView, one: Misread) -> Finding:
        prefix, state = int(view.forward.prefix_lens[one.request]), one.state.tolist()
        writer = state[STATE_REQUEST]
        of = f" for request {self.history.request_table.name(writer)}" if writer >= 0 else ""
        pool = self.history.header.states[one.pool].name
        said = SAID[one.cause].format(position=state[STATE_POSITION])
        detail = f"went on from {prefix} tokens with state slot {one.slot} of {pool}: {said}"
        known, writer = state[STATE_EVENT] > 0, writer if state[STATE_EVENT] else -1
        detail += f", filled in event {state[STATE_EVENT] - 1}{of}" if known else ""
        cause = Cause(one.cause, writer)
        events = [state[STATE_EVENT] - 1] if known else []
        return self.of_request(view.forward, one.request, detail, events=events, cause=cause, position=prefix - 1)
