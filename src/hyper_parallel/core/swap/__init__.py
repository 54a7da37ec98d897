"""The swap engine: storages move to slower memory and back, in order. The README in this folder has the rules."""
