"""Which compilers: one adapter each, hooked into the compiler's own cache."""
