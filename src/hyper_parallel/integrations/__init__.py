"""Memory plans where users already train: Hugging Face's Trainer, Accelerate, Lightning.

Each module needs its library and nothing else.
"""
