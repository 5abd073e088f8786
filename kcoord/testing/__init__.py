"""Conformance suites: pytest classes to inherit, one for each interface that others may implement."""
