"""Job traces: read public formats, write the canonical CSV, generate synthetic traces, and summarise them."""

from __future__ import annotations
