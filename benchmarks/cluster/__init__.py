"""A simulated cluster: everything that a job runs, except that the compiler sleeps as long as the real one took."""
