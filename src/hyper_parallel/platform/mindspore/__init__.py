"""MindSpore's side of the platform layer; it mirrors `torch` file by file. README.md lists what it works around."""
