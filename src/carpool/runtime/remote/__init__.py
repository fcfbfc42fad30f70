"""Executors on other machines: the agent, its link, protocol and files."""
