"""IADeep: interference-aware co-location with tuned batch sizes."""
