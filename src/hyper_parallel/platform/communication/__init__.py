"""What communication means, whatever the framework: groups, collectives, their gradients, and failures that name a rank."""
