"""Rules that hold under every policy: priorities, host resources, policy handover and validation."""
