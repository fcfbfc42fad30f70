"""Pages about a daemon: rendered on the server, kept up to date by its feed."""
