"""The swap engine's device on PyTorch."""
