"""Alarms: rules over the run's figures, and what is done when one is broken."""
