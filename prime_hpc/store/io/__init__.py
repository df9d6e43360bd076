"""Bytes to and from disks and shared file systems: atomic, durable, checked writes."""
