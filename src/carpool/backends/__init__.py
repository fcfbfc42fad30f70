"""Local backend: joins the scheduler to the executor of this machine and keeps what a run writes to disk."""
