"""Notices, spans and their figures and logs: the telemetry that ranks and agents emit."""
