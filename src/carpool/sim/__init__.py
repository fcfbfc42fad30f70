"""The simulator: a heap of events and a world that owns the truth, around the same scheduler that runs live."""
