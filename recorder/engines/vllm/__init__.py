"""Adapter for vLLM: what vLLM calls when it looks for plugins (entry point group `vllm.general_plugins`).

Nothing happens, and nothing of weight is imported, unless a recording is asked for. Then every process that runs a
model writes a trace of its own. vLLM calls this in all its processes, front end included, before it has imported
what is hooked: the hooks are set when a process does. See docs/guide/production.md.
"""

import logging

from ...process.environment import is_wanted

logger = logging.getLogger("kvcanary")


def plugin() -> None:
    """Prepare the hooks where a recording is asked for; never raises into the engine."""
    if not is_wanted():
        return
    try:
        from ...process.environment import share_run_id
        from .hooks import install

        share_run_id()
        install()
    except Exception:
        logger.exception("kvcanary: not recording: the vLLM adapter could not be set up")
