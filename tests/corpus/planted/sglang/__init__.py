"""Bugs planted into SGLang: what the rules were written with (`known`), and each round of what was held out."""
