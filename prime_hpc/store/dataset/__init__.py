"""Data sets on disk: their files and columns, and where images stand in their rows."""
