"""Repacking measured: a simulator over length distributions, the solvers, calibration of the cost
model."""
