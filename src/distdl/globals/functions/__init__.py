"""What torch's functions do to global tensors, a family in each file."""
