"""The daemon: the same scheduler behind an asyncio loop, with a store that survives what machines do to it."""
