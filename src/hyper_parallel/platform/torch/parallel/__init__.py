"""What parallel training needs of PyTorch."""
