"""The pure floor: values, rules and the scheduler. Standard library only; no clock, no thread, no randomness."""
