"""What the spec asks for by name on PyTorch and no other path uses."""
