"""The operators' rules, by kind. Pure functions from specs and static arguments to an answer; both frameworks use them."""
