"""What is to be known of tensors: their memory, their dtypes, and how they are differentiated."""
