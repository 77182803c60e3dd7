"""Commands of the command line that look at a model."""
