"""The operators' rules, by kind.

They are pure functions from specs and static arguments to an answer. Both frameworks use them.
"""
