"""Models of rates, costs and remaining work, fitted to what jobs report."""
