"""Tree policies: which draft tokens are proposed and verified."""
