"""Bugs planted into gLLM: each round of what was held out."""
