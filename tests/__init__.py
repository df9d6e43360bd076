"""Tests: `unit` in seconds and without servers, `integration` with real processes."""
