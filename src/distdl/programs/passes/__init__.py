"""What is done to a recorded step before it becomes a line. Each pass gives the same bits."""
