"""The swap engine's device on MindSpore."""
