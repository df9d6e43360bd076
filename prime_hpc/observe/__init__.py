"""Logs, metrics, status and reports. Any room may call it; it calls none."""
