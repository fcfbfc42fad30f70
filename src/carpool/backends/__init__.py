"""Where orders are carried out: the scheduler joined to this machine and its executor."""
