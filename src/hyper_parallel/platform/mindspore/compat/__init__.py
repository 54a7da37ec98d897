"""What the spec asks for by name on MindSpore and no other path uses."""
