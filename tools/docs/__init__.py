"""Generated parts of the documentation: command line, options and figures of methods, the walk-through's notebook."""
