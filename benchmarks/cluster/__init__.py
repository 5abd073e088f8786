"""A simulated cluster: all parts of a job are real, but the compiler sleeps for the recorded seconds."""
