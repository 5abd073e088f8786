"""Counters, notices, spans, progress and logs: the telemetry that ranks and agents emit."""
