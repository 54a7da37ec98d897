"""Regions on PyTorch: their forward, and what runs again in backward."""
