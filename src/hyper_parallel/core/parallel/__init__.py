"""Parallel training, without a framework: what is here is pure, and works on any that the platform knows."""
