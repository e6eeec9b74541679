"""Bugs planted into LightLLM: each round of what was held out."""
