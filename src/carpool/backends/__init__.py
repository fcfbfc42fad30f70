"""Where orders are carried out: this machine, a Ray cluster, a federation."""
