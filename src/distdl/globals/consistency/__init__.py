"""How workers find out that their weights differ."""
