"""Bugs planted into mini-sglang: each round of what was held out."""
