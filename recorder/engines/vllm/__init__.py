"""Adapter for vLLM: what vLLM calls when it looks for plugins (entry point group `vllm.general_plugins`).

Nothing happens, and nothing of weight is imported, unless a recording is asked for. Then every process that runs a
model writes a trace of its own. vLLM calls this in all its processes, front end included, before it has imported
what is hooked: the hooks are set when a process does. See docs/guide/production.md.
"""

from ..common.attachment import begin_plugin


def plugin() -> None:
    """Prepare the hooks if a recording is asked for; never raises into the engine."""
    begin_plugin("vLLM", __name__)
