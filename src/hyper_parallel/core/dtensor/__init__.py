"""Distributed tensors: mesh, layouts, boxes, redistribution. The README in this folder has the words and the rules."""
