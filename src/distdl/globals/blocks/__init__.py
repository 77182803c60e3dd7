"""Functions and modules that compute on blocks."""
