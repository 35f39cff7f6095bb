"""A model of one training step, from measured rates, for more GPUs than were measured."""
