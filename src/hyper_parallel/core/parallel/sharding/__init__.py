"""Sharded data parallel without a framework: units, leases, the order of gathers and reductions. See README.md."""
