"""Rules that users write as a class."""
