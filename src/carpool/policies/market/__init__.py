"""The default policy: market-clearing prices for devices, and an exact assignment at the margin."""
