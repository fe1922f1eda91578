"""Training of every head that the suites of docs/results compare, in one run that can be resumed."""
