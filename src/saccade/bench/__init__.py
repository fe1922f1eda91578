"""Fair comparisons that anyone can rerun: suites, runner, metrics, reports."""
