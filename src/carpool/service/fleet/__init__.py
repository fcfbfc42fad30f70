"""Fleet: how the daemon reaches the executors of its machines, loses them and asks for more."""
