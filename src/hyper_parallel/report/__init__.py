"""What people would rather look at than read: one self-contained HTML page per plan."""
