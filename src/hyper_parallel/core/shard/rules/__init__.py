"""The operators' rules, by kind. Pure functions from specs and static arguments to a decision; both frameworks use them."""
