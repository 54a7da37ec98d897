"""The wrappers of modules on MindSpore."""
