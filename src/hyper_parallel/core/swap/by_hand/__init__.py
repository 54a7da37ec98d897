"""Pairing layers by hand: groups by name, the storages in them, and the tensors in those."""
