"""Device side of a federation: trainings that run some samples from given weights and return new ones."""
