"""Launchers: the agent beside the job, and every rank's compilers hooked."""
