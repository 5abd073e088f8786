"""Every row of docs/faults.md, with its fault injected for real."""
