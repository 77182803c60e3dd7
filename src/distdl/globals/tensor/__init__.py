"""The types global tensor, replica and block, what torch calls for them, and the table from functions to handlers."""
