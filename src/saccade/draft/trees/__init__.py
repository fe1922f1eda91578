"""Tree policies: which guesses are drafted and verified."""
