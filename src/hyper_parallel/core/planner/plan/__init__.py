"""The plan that the user holds: its budget, its file, its table, and the model that carries it out."""
