"""KV connectors of vLLM: what they load into a cache, and what those that are known copy."""
