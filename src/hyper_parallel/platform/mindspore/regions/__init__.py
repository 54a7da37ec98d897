"""Regions on MindSpore: their forward, and what runs again in backward."""
