"""TRIP: click prediction from a history in ranks, times and temporal groups (`docs/trip.md`)."""
