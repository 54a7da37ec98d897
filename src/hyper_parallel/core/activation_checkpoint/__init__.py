"""Save, recompute or swap what backward needs."""
