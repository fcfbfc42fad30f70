"""Web dashboard of a daemon: server-rendered pages, updated through server-sent events."""
