"""Rules by which many functions compute: ops, whole dims, labels; checks of arguments; the fallback to one worker."""
