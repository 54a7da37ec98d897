"""What parallel training needs of MindSpore."""
