"""Placeholder."""

raise SystemExit(1)
