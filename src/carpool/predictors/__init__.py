"""Models of rates and remaining work that are fitted to what jobs report."""
