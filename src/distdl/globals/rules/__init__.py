"""What many functions have in common, and the fallback to one worker."""
