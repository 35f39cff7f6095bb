"""The Hydra configuration groups, shipped inside the wheel (`pkg://configs`)."""
