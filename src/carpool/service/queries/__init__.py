"""Read side of the daemon: views, event log, allocation history and forecasts."""
