"""What a step is to the planner: its profile, and what a decision costs in bytes and in time."""
