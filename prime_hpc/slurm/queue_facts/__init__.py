"""Asked before a job is sent: when it would start, and how many jobs its user may have."""
