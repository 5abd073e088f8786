"""Notices, spans and their figures, progress and logs: the telemetry that ranks and agents emit."""
