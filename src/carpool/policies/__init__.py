"""Scheduling policies, looked up by name; heavy dependencies are imported only by the policy that needs them."""
