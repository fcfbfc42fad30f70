"""Traces: reading the public formats, writing our own, making new ones, and saying what is in them."""

from __future__ import annotations
