"""The commands of ``carpool``, grouped into modules by topic."""
