"""What regions and wrappers need on every framework and what knows none: options, arguments, calls of modules, passes of backward."""
