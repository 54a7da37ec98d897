"""Checkpoints of models on any number of ranks; the rules are in README.md."""
