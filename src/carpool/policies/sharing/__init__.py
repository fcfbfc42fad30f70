"""GPU sharing policies and the search, measurement and models they have in common."""
