"""Tensors and ranks only; nothing here knows about modules or models."""
