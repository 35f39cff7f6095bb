"""A decoder whose layers attend in different ways, with a mixture of experts; on one process."""
