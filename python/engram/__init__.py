"""Rows of n-gram embedding tables, read in place from safetensors checkpoints."""
