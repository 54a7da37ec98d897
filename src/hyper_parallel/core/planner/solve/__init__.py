"""Finding the decision that fits the budget and loses the least time."""
