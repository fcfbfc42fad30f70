"""Generated machines with mixed links, and a simulation of every transfer between their devices."""
