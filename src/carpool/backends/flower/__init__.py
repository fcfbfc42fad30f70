"""Flower as the transport of a federation: relays, the resident device, SuperLink and SuperNode processes."""
