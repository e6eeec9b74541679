"""Bugs planted into swiftLLM: each round of what was held out."""
