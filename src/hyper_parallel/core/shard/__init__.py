"""Operators on distributed tensors: rules, dispatcher, users' own functions. See README.md."""
