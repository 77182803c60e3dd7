"""The types: global tensors, replicas and blocks; and the table from functions to handlers."""
