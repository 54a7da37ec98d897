"""Which of the solver's decisions is taken, and how it is made better by small changes."""
