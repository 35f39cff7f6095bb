"""Data and metrics of click prediction: interaction tables, targets, negatives, exact AUC."""
