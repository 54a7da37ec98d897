"""The memory planner: a profile goes in, a plan comes out. See the README."""
