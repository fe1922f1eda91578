"""Memory, disk and hours of a run by configurations and data sheets alone: no weights, no GPU."""
