"""Bugs planted into LMDeploy: each round of what was held out."""
