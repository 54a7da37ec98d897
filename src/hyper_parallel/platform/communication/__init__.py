"""What communication means, whatever the framework.

Groups, collectives, their gradients, and failures that name a rank; see the README.
"""
