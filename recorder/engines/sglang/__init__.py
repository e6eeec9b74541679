"""Adapter for SGLang: what SGLang calls when it looks for plugins (entry point group `sglang.srt.plugins`).

Nothing happens, and nothing of weight is imported, unless `KVCANARY_TRACE` names a folder. Then every process that
runs a model writes a trace of its own into that folder. See docs/guide/production.md.
"""

import logging

from ...process.environment import is_wanted

logger = logging.getLogger("kvcanary")


def plugin() -> None:
    """Set the hooks where a recording is asked for; never raises into the engine."""
    if not is_wanted():
        return
    try:
        from ...process.environment import share_run_id
        from .hooks import install

        share_run_id()
        install()
    except Exception:
        logger.exception("kvcanary: not recording: the SGLang adapter could not be set up")
