"""Analyses of a job for people: time line, findings, divergent keys, the HTML page. Only the CLI imports this package."""
