"""HTTP server: FastAPI routes, authentication, request limits, event streams and metrics."""
