"""The wrappers of modules on PyTorch."""
