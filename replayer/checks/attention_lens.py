"""Attention reads more or less than a request has, or computes other query tokens than the forward adds.

Invariant: the sequence length that attention got is the request's prefix and extend together, the query length its
extend. A cached prefix that is left out, a stale length and one that is one off show here. Evidence: the forward.
Legitimate exceptions: padding rows; lengths that the adapter did not observe (-1). What a backend means by its lengths in
a sliding window, a draft step or a verify forward is for the adapter to bring to whole requests before it tells them.
"""

import numpy as np

from ..report.findings import Finding
from .check import Covered, HistoryCheck
from .reporting import forward_finding
from .view import ForwardView


class AttentionLens(HistoryCheck):
    """Compares what attention got with the batch."""

    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request of which attention got another length."""
        forward, got = view.forward, view.forward.attention
        derived = self._history.header.runners[forward.runner].derived
        if got is None or "prefix_lens" in derived or "extend_lens" in derived:
            return []
        extend = np.maximum(forward.extend_lens, 0)
        end = forward.prefix_lens + extend
        unknown = np.full(len(end), -1, np.int64)
        seq_lens = got.seq_lens if len(got.seq_lens) else unknown
        query_lens = got.query_lens if len(got.query_lens) else unknown
        longer = (seq_lens >= 0) & (seq_lens != end)
        wrong = (longer | ((query_lens >= 0) & (query_lens != extend))) & (forward.req_pool_indices != 0)
        findings = []
        for r in np.flatnonzero(wrong).tolist():
            prefix, added = int(forward.prefix_lens[r]), int(extend[r])
            has = f"the request has {prefix:,} cached and {added:,} new"
            if longer[r]:
                detail = f"attention read {int(seq_lens[r]):,} tokens, {has}"
            else:
                detail = f"attention computed {int(query_lens[r]):,} query tokens, {has}"
            findings.append(
                forward_finding(
                    "attention_lens",
                    forward,
                    self._history.request_table,
                    request=r,
                    group=-1,
                    position=min(prefix + added, int(seq_lens[r])) if longer[r] else prefix,
                    slot=-1,
                    detail=detail,
                )
            )
        return findings
